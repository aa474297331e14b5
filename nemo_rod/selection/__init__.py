"""Selection of the training blocks: candidates, references, scores, policies and their record.

The algorithm, one module per line (numpy and the standard library only):

    candidates.pool(step)                  candidates.py, permutation.py
    references[block_ids]                  references/
    policy.select(pool, score, k)          policies.py, schedule.py, odm.py, choice.py
    curriculum.append(choice)              curriculum/

`selector.py` combines the first three; `curriculum/journal.py` records the result with the step's
metrics; `dealing.py` assigns the chosen blocks to replicas.
"""

from nemo_rod.roles import SourceRow as SourceRow
from nemo_rod.selection.candidates import Candidates as Candidates
from nemo_rod.selection.candidates import Pool as Pool
from nemo_rod.selection.choice import Choice as Choice
from nemo_rod.selection.choice import OnNonfinite as OnNonfinite
from nemo_rod.selection.choice import choose as choose
from nemo_rod.selection.competition import selection_metrics as selection_metrics
from nemo_rod.selection.curriculum.header import CurriculumHeader as CurriculumHeader
from nemo_rod.selection.curriculum.log import Curriculum as Curriculum
from nemo_rod.selection.curriculum.recorded_pools import replay_share as replay_share
from nemo_rod.selection.policies import Joint as Joint
from nemo_rod.selection.policies import Policy as Policy
from nemo_rod.selection.policies import TakeAll as TakeAll
from nemo_rod.selection.policies import reducible_loss as reducible_loss
from nemo_rod.selection.references import ReferenceManifest as ReferenceManifest
from nemo_rod.selection.references import References as References
from nemo_rod.selection.references import ReferenceWriter as ReferenceWriter
from nemo_rod.selection.selector import Selector as Selector
