"""KV as a window moves it: its layout, relocation, patches and the kernels that load it (Kamera, section 3).

    K(B|A) at p  ~=  R(p) (K0 + U_K V_K^T)        V(B|A)  ~=  V0 + U_V V_V^T

Relocation (``rope``, ``relocate``) is exact; patches (``deficit``, ``lowrank``, ``patch``, ``basis``, ``pooling``, ``orbit``)
restore what a chunk absorbs from those in front. Everything here works on tensors alone: no store, no engine, no window.
``layout`` and ``config`` can be imported without torch.
"""
