"""torchft's lighthouse, which coordinates the replicas."""

from torchft._torchft import lighthouse_main

lighthouse_main()
