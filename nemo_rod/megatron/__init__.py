"""The selector and the scorer on NVIDIA's trainer: Megatron-core and Megatron-Bridge.

Importing this package makes both importable where there is no CUDA (`cpu/`), and where there is no
TransformerEngine (`plain/`).
"""

from nemo_rod.megatron import cpu, plain

plain.prepare()
cpu.install()
plain.patch()
