"""The selector and the scorer on NVIDIA's trainer: Megatron-core and Megatron-Bridge.

Importing this package makes both importable where there is no CUDA (`cpu/`).
"""

from nemo_rod.megatron import cpu

cpu.install()
