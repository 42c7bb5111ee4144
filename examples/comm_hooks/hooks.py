"""Averaging of gradients with fewer bytes: what a rank gives, and what all ranks make of it.

A method is a function of this rank's vector. It returns the average that all ranks have now, and this rank's part in
it, which is less than the vector. With error feedback the rest is added to the vector of the next step. `sent` collects
the bytes that a rank has given to collectives. An all-gather brings them to each other rank, so the traffic of top-k,
threshold, sign and TernGrad grows with the number of ranks; that of an all-reduce does not.

Sources: top-k and threshold, Strom 2015, Lin et al. 2018; random-k with error feedback, Stich et al. 2018; 1-bit sign,
Seide et al. 2014, Karimireddy et al. 2019; TernGrad, Wen et al. 2017; PowerSGD, Vogels et al. 2019; count sketch,
Ivkin et al. 2019.
"""

import torch
import torch.distributed as dist
from torch import Tensor

SHARE = 16  # one value of so many is sent by top-k, random-k and the count sketch
NODE = 2  # ranks of a node, for `two_level`
sent = [0]


def summed(x: Tensor) -> Tensor:
    sent[0] += x.nbytes
    dist.all_reduce(x)
    return x


def gathered(x: Tensor) -> list[Tensor]:
    sent[0] += x.nbytes
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return found


def mean(parts: list[Tensor], mine: Tensor) -> tuple[Tensor, Tensor]:
    return torch.stack(parts).mean(0), mine


def half(kind: torch.dtype, v: Tensor) -> tuple[Tensor, Tensor]:
    mine = (v / dist.get_world_size()).to(kind)
    return summed(mine.clone()).to(v.dtype), v


def chosen(v: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """The values at `where`, of which ranks may give other places and other numbers."""
    most = torch.tensor(len(where), device=v.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    indices, values = v.new_zeros(int(most), dtype=torch.int32), v.new_zeros(int(most))
    indices[: len(where)], values[: len(where)] = where.int(), v[where]
    places, parts = gathered(indices), gathered(values)
    spread = [torch.zeros_like(v).index_add_(0, i.long(), x) for i, x in zip(places, parts, strict=True)]
    return mean(spread, torch.zeros_like(v).index_copy_(0, where, v[where]))


def top(v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    return chosen(v, v.abs().topk(len(v) // SHARE + 1).indices)


def threshold(v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    return chosen(v, (v.abs() > 2.5 * v.square().mean().sqrt()).nonzero()[:, 0])


def same(v: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """The values at `where`, which are the same places on all ranks."""
    average = torch.zeros_like(v).index_copy_(0, where, summed(v[where]) / dist.get_world_size())
    return average, torch.zeros_like(v).index_copy_(0, where, v[where])


def random(v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(v), generator=torch.Generator().manual_seed(step))
    return same(v, order[: len(v) // SHARE + 1].to(v.device))


def sketch(v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Sums of values in a small table find the largest places of the average; then their values are averaged."""
    generator, lines, wide = torch.Generator().manual_seed(len(v)), 5, len(v) // (2 * SHARE) + 1
    column = torch.randint(wide, (lines, len(v)), generator=generator).to(v.device)
    sign = torch.randint(2, (lines, len(v)), generator=generator).to(v.device) * 2 - 1
    table = summed(v.new_zeros(lines, wide).scatter_add_(1, column, sign * v))
    guessed = (table.gather(1, column) * sign).median(0).values
    return same(v, guessed.abs().topk(len(v) // SHARE + 1).indices)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes [n] of `bits` bits in bytes [n / (8 / bits)]."""
    codes = torch.nn.functional.pad(codes, (0, -len(codes) % (8 // bits))).view(-1, 8 // bits)
    return (codes << torch.arange(0, 8, bits, device=codes.device)).sum(1).to(torch.uint8)


def unpacked(data: Tensor, bits: int, count: int) -> Tensor:
    return (data[:, None] >> torch.arange(0, 8, bits, device=data.device) & 2**bits - 1).flatten()[:count]


def coded(scale: Tensor, codes: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """A rank's value is its scale times (code - 1), and with one bit times 1 or -1."""
    lowest, stride = (1, 1) if bits == 2 else (1, 2)
    parts = [unpacked(data, bits, len(codes)) * stride - lowest for data in gathered(packed(codes, bits))]
    scaled = [s * part for s, part in zip(gathered(scale.view(1)), parts, strict=True)]
    return mean(scaled, scale * (codes * stride - lowest))


def sign(v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    return coded(v.abs().mean(), (v > 0).long(), 1)


def ternary(v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """-1, 0 or 1 by chance, so that the expected value is `v`."""
    scale = v.abs().max().clamp(min=1e-30)
    return coded(scale, (v.sign() * torch.bernoulli(v.abs() / scale)).long() + 1, 2)


def two_level(v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Ranks of a node give theirs to its first one; only the first ones speak with other nodes. `sent` has what goes
    from node to node."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total, other = v.clone(), torch.empty_like(v)
    first = rank - rank % NODE
    mates = range(first + 1, min(first + NODE, world)) if rank == first else []
    nodes = range(NODE, world, NODE) if rank == 0 else []
    for source in [*mates, *nodes]:
        dist.recv(other, source)
        total += other
    if rank > 0:
        above = 0 if rank == first else first
        dist.send(total, above)
        dist.recv(total, above)
        sent[0] += v.nbytes if rank == first else 0
    for target in [*nodes, *mates]:
        dist.send(total, target)
        sent[0] += v.nbytes if target in nodes else 0
    return total / world, v


def low_rank(matrix: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """PowerSGD of a matrix [n, m] with q [m, rank]: the average, and the next q."""
    p = torch.linalg.qr(summed(matrix @ q))[0]
    mine = matrix.T @ p
    q = summed(mine.clone()) / dist.get_world_size()
    return p @ q.T, p @ mine.T, q


METHODS = {
    "none": lambda v, step: (summed(v.clone()) / dist.get_world_size(), v),
    "fp16": lambda v, step: half(torch.float16, v),
    "bf16": lambda v, step: half(torch.bfloat16, v),
    "top": top,
    "random": random,
    "threshold": threshold,
    "sign": sign,
    "ternary": ternary,
    "sketch": sketch,
    "two_level": two_level,
}
FEEDBACK = {"top", "random", "threshold", "sign", "sketch", "powersgd"}
