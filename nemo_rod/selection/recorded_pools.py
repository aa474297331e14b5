"""The pools of a recorded run, so that another model can train on its curriculum."""

from __future__ import annotations

from nemo_rod.selection.candidates import Pool
from nemo_rod.selection.curriculum import Curriculum
from nemo_rod.selection.curriculum_header import Store, refuse_other_store


class RecordedPools:
    """The blocks that a recorded run trained on, for training another model on its curriculum.

    With `TakeAll` this is the paper's curriculum transfer (Section "Cross-scale").
    """

    def __init__(self, curriculum: Curriculum, store: Store | None = None) -> None:
        """Read pools from an open curriculum; it stays open.

        Args:
            curriculum: What a run recorded.
            store: The block store that the pools will be read from.

        Raises:
            ValueError: The curriculum was recorded with another tokenizer, block size or store.
        """
        if store is not None:
            refuse_other_store(curriculum.path, curriculum.header, store)
        self._curriculum = curriculum

    @property
    def size(self) -> int:
        """Number of blocks per step: the recorded run's batch size."""
        return self._curriculum.header.num_chosen

    def __len__(self) -> int:
        """Return the number of recorded steps."""
        return len(self._curriculum)

    def pool(self, step: int) -> Pool:
        """Return what was trained on at a step, in the order of the recorded pool.

        Raises:
            ValueError: The step was not recorded.
        """
        header = self._curriculum.header
        if not header.first_step <= step < self._curriculum.next_step:
            raise ValueError(
                f"{self._curriculum.path} holds steps {header.first_step} to "
                f"{self._curriculum.next_step - 1}, but step {step} was asked for: set train.steps "
                "to what was recorded, or record a longer run"
            )
        record = self._curriculum[step - header.first_step]
        ids = record.block_ids[record.chosen]
        return Pool(step=step, block_ids=ids, is_replay=header.is_replay(ids))
