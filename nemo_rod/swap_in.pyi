"""The former home of `nemo_rod.hosts.swap_in` as type checkers see it."""

from nemo_rod.hosts.swap_in import install as install
from nemo_rod.hosts.swap_in import reference as reference
from nemo_rod.hosts.swap_in import score as score
