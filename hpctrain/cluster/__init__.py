"""Where am I: node lists, environments, ranks. Imports no torch."""

from hpctrain.cluster.detect import ENVIRONMENT_VARIABLE, detect
from hpctrain.cluster.hostlist import compress_hostlist, expand_hostlist
from hpctrain.cluster.ranks import Ranks

__all__ = ["ENVIRONMENT_VARIABLE", "Ranks", "compress_hostlist", "detect", "expand_hostlist"]
