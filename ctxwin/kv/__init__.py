"""What KV is made of and the operator on it: relocate exactly, patch the conditioning (Kamera, section 3).

    K(B|A) at p  ~=  R(p) (K0 + U_K V_K^T)        V(B|A)  ~=  V0 + U_V V_V^T

Pure functions on tensors. Only `ctxwin.kv.layout` is free of torch.
"""
