"""Imports of the server of forks (`forks.py`), for no other module.

Failed imports are left out, as a job reports them, and so are warnings of imports.
"""

from __future__ import annotations

import gc
import os
import signal
from contextlib import suppress

from nemo_rod.signals import end_with_parent

end_with_parent(signal.SIGKILL)  # stop signals are blocked here
_nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(_nowhere, 1)
os.dup2(_nowhere, 2)
with suppress(Exception):
    import torch.distributed.run  # noqa: F401

    import nemo_rod.megatron.forward_jobs
    import nemo_rod.megatron.train_job  # noqa: F401
gc.freeze()  # imported objects stay: no collection in a fork walks through it, or copies its pages
