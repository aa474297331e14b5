"""The selector and the scorer on NVIDIA's trainer: Megatron-core and Megatron-Bridge.

Importing this package makes both importable without CUDA and without TransformerEngine.
"""

from nemo_rod import parts

PLATFORM = parts.load("platforms", "cpu")
PLATFORM.prepare()
