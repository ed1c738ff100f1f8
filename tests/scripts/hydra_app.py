"""A Hydra app whose result depends on its override, and on all ranks."""

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig


@hydra.main(version_base=None, config_path=None)
def main(config: DictConfig) -> None:
    total = torch.tensor(float(config.lr))
    dist.all_reduce(total)
    print("total", total.item())


if __name__ == "__main__":
    main()
