"""Recompute grains on other ranks, to detect wrong gradients before they are applied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import xxhash

from hpctrain.errors import SilentCorruption, Suspect, describe_suspects
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.base.rng import derive_seed
from hpctrain.training.data.batch_plan import DataRank, RankBatch


@dataclass(frozen=True)
class Witness:
    """Comparison of gradients of the same grain from two ranks, on two nodes if possible; collective."""

    context: DistributedContext
    every: int
    grain_size: int
    seed: int
    suspect: Suspect
    distance: int

    def chosen_grain(self, rank_batch: RankBatch, owner: int) -> int | None:
        """Return the grain of `owner` that another rank recomputes in this step; None if it has no grain."""
        world_size = self.context.ranks.world_size
        low, high = DataRank(owner, world_size, self.grain_size).part(rank_batch.batch_size)
        first_grain, count = low // self.grain_size, -(-(high - low) // self.grain_size)
        return first_grain + derive_seed(self.seed, "witness", rank_batch.step) % count if count else None

    def compare(
        self, rank_batch: RankBatch, own_hash: int | None, recompute: Callable[[int], int], verified_step: int
    ) -> None:
        """Raise SilentCorruption on all ranks if gradients of the same grain differ."""
        ranks = self.context.ranks
        shift = self.distance
        grains = [self.chosen_grain(rank_batch, owner) for owner in range(ranks.world_size)]
        # A rank whose partner has no grain computes any grain, because passes may be collective.
        seen_hash = recompute(grains[(ranks.rank - shift) % ranks.world_size] or 0)
        hashes = self.context.all_gather((own_hash, seen_hash))
        for owner, grain in enumerate(grains):
            witness = (owner + shift) % ranks.world_size
            if grain is not None and hashes[owner][0] != hashes[witness][1]:
                votes = self.context.all_gather(recompute(grain))
                of_pair = {owner: hashes[owner][0], witness: hashes[witness][1]}
                raise self._make_error(rank_batch.step, of_pair, votes, verified_step)

    def _make_error(
        self, step: int, of_pair: Mapping[int, int | None], votes: list[int], verified_step: int
    ) -> SilentCorruption:
        of_ranks = [Suspect(*fields) for fields in self.context.all_gather(tuple(self.suspect))]
        (truth, num_votes), *runners_up = Counter([*of_pair.values(), *votes]).most_common(2)
        is_clear = num_votes > (runners_up[0][1] if runners_up else 0)
        odd = {rank for rank, value in of_pair.items() if value != truth}
        odd |= {rank for rank, value in enumerate(votes) if value != truth}
        suspects = tuple(of_ranks[rank] for rank in sorted(odd if is_clear else of_pair))
        pair = " and ".join(map(str, of_pair))
        majority = (
            f"All {len(votes)} ranks then computed this grain again. {num_votes} of the "
            f"{len(votes) + len(of_pair)} gradients agree. The others were computed by"
        )
        text = (
            f"In step {step}, ranks {pair} computed different gradients of the same grain. "
            f"{describe_suspects(majority if is_clear else None, suspects, verified_step)} "
            "The gradients were not applied."
        )
        return SilentCorruption(text, suspects, verified_step)


def witness_distance(context: DistributedContext) -> int:
    """Collective. Return a distance between ranks on different nodes, if there are several."""
    max_per_node = max(context.all_gather(context.ranks.local_world_size))
    return max_per_node if max_per_node < context.ranks.world_size else 1


def hash_gradients(gradients: Mapping[int, int]) -> int:
    return hash_numbers(torch.tensor([value - 2**63 for _, value in sorted(gradients.items())]))


def hash_numbers(tensor: torch.Tensor) -> int:
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return int(xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data))
