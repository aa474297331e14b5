"""The selector and the scorer on NVIDIA's trainer: Megatron-core and Megatron-Bridge.

With `cpu/`, importing this package makes both importable without CUDA and without
TransformerEngine.
"""

from nemo_rod import parts

STAND_INS = parts.load_all("stand_ins")
for stand_in in STAND_INS:
    stand_in.prepare()
