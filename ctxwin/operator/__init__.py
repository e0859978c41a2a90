"""The operator: relocate exactly, patch the conditioning (Kamera, section 3). Pure functions on tensors.

    K(B|A) at p  ~=  R(p) (K0 + U_K V_K^T)        V(B|A)  ~=  V0 + U_V V_V^T

Importing this package imports torch; ``import ctxwin`` does not import this package.
"""

from ctxwin.operator.basis import SharedBasis, fit_basis, project
from ctxwin.operator.config import check_supported, kv_spec_from_config, rope_spec_from_config
from ctxwin.operator.deficit import Deficit, deficit
from ctxwin.operator.lowrank import Weight, truncated_svd
from ctxwin.operator.orbit import OrbitMean, blend, orbit_mean
from ctxwin.operator.patch import Patch, apply_patch, compress, form_patch
from ctxwin.operator.relocate import canonicalise, relocate, relocation_error
from ctxwin.operator.rope import angles, shift_angles, turn

__all__ = [
    "Deficit", "OrbitMean", "Patch", "SharedBasis", "Weight", "angles", "apply_patch", "blend", "canonicalise",
    "check_supported", "compress", "deficit", "fit_basis", "form_patch", "kv_spec_from_config", "orbit_mean", "project",
    "relocate", "relocation_error", "rope_spec_from_config", "shift_angles", "truncated_svd", "turn",
]  # fmt: skip
