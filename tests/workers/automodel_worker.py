"""Our example of NeMo Automodel in processes without a GPU: --config FILE.yaml and its keys.

Automodel asks CUDA for its device wherever it runs, and resets the counters of its memory.
"""

from typing import Any

import torch

from nemo_rod.cpu import devices


class OnCPU:
    """torch, whose devices are all the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *_: Any) -> torch.device:
        return torch.device("cpu")


if __name__ == "__main__":
    torch.set_num_threads(1)
    devices.redirect()
    torch.cuda.reset_peak_memory_stats = lambda device=None: None
    import automodel
    from nemo_automodel._transformers import auto_model

    auto_model.torch = OnCPU()
    automodel.main()
