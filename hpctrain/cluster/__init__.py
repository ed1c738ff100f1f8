"""Detection of a process's environment: node lists, launchers, ranks. Imports no torch."""

from hpctrain.cluster.detection import detect
from hpctrain.cluster.env_variables import ENVIRONMENT_VARIABLE
from hpctrain.cluster.hostlist import compress_hostlist, expand_hostlist
from hpctrain.cluster.ranks import Ranks

__all__ = ["ENVIRONMENT_VARIABLE", "Ranks", "compress_hostlist", "detect", "expand_hostlist"]
