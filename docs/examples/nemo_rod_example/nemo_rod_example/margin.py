"""A metric of steps: by how much the chosen blocks' scores exceed those of the others."""

import numpy as np


def margin(choice, source_C, names):
    if choice.score is None:
        return {}
    others_C = np.delete(choice.score, choice.chosen)
    others_C = others_C[np.isfinite(others_C)]  # -inf is padding
    gap = choice.score[choice.chosen].mean() - others_C.mean() if len(others_C) else None
    return {"margin/scores": gap if gap is None else float(gap)}
