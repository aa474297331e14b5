"""The public names as type checkers and editors see them; __init__.py imports them when used."""

from nemo_rod.corpus.hashing import block_hash as block_hash
from nemo_rod.corpus.hashing import is_holdout as is_holdout
from nemo_rod.corpus.pack import pack as pack
from nemo_rod.corpus.store import BlockStore as BlockStore
from nemo_rod.hosts.plain_torch.batches import RoDBatches as RoDBatches
from nemo_rod.hosts.swap_in import install as install
from nemo_rod.hosts.swap_in import watch as watch
from nemo_rod.megatron.rod_selector import RoDSelector as RoDSelector
from nemo_rod.selection.candidates import Candidates as Candidates
from nemo_rod.selection.candidates import Pool as Pool
from nemo_rod.selection.curriculum.log import Curriculum as Curriculum
from nemo_rod.selection.forgetting import validation_forgetting as validation_forgetting
from nemo_rod.selection.policies import FixedShare as FixedShare
from nemo_rod.selection.policies import Joint as Joint
from nemo_rod.selection.policies import TakeAll as TakeAll
from nemo_rod.selection.policies import reducible_loss as reducible_loss
from nemo_rod.selection.references import References as References

__version__: str
__all__: list[str]
