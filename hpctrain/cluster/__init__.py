"""Where am I: node lists, environments, ranks. Imports no torch."""

from hpctrain.cluster.detect import detect
from hpctrain.cluster.hostlist import compress_hostlist, expand_hostlist
from hpctrain.cluster.ranks import Ranks
from hpctrain.cluster.variables import ENVIRONMENT_VARIABLE

__all__ = ["ENVIRONMENT_VARIABLE", "Ranks", "compress_hostlist", "detect", "expand_hostlist"]
