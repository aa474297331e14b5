"""The section `example` of the configuration."""

from dataclasses import dataclass

from nemo_rod.bounds import key


@dataclass
class Example:
    parameters: bool = False  # whether `evaluate` counts the parameters of every arm
    shares: int = key(0, ">= 0")  # steps averaged by a line of the stage `shares`; 0: no stage
