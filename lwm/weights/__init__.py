"""Other people's weights: reading them in, writing ours out."""

from lwm.weights.hf import import_hf
from lwm.weights.hf_export import export_hf
from lwm.weights.lwm_params import import_lwm

__all__ = ["export_hf", "import_hf", "import_lwm"]
