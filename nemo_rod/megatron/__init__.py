"""The selector and the scorer on NVIDIA's trainer: Megatron-core and Megatron-Bridge.

Importing this package makes both importable without CUDA (`cpu/`) and without TransformerEngine
(`plain/`).
"""

from nemo_rod import cpu
from nemo_rod.cpu import plain

plain.prepare()
cpu.install()
plain.patch()
