"""What each of two GPUs does in the tests of the fused all-reduce; importable by the ranks' processes."""
from __future__ import annotations

import torch

from gptoss_kernels.comm import FusedAllReduce, FusedOwnRows, all_reduce_norm, own_ranges
from gptoss_kernels.comm.reference import sum_own_rows
from gptoss_kernels.reference.quant import dequantise_groups


def inputs(own, rows, hidden, seed, dtype):
    """This rank's part, all parts, and the residual and weight that all ranks share."""
    parts = [torch.randn(rows, hidden, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)
             for rank in range(own.world)]
    g = torch.Generator().manual_seed(seed)
    residual, weight = torch.randn(rows, hidden, generator=g).to(dtype), 1 + 0.2 * torch.randn(hidden, generator=g)
    return parts, residual, weight


def errors(own, form, rows_list, hidden, dtype, rounds):
    """Largest differences (sum, norm) from the reference over many calls in a row, each with new numbers."""
    group = own.group(range(own.world)).process_group
    fused = FusedAllReduce(group, max(rows_list), hidden, dtype)
    worst = [0.0, 0.0]
    for seed in range(rounds):
        for rows in rows_list:
            parts, residual, weight = inputs(own, rows, hidden, seed, dtype)
            fused.part(rows).copy_(parts[own.rank])
            found = fused(residual.cuda(), weight.cuda(), form=form)
            exact = all_reduce_norm(parts, residual, weight)
            for n in range(2):
                error = (found[n].cpu().float() - exact[n].float()).abs().max().item()
                worst[n] = max(worst[n], error)
    return worst


def replayed(own, form, rows, hidden):
    """Two calls captured in a graph and replayed with new parts; the largest difference over the replays."""
    group = own.group(range(own.world)).process_group
    fused = FusedAllReduce(group, rows, hidden, torch.bfloat16)
    given = [torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    residual, weight = torch.zeros_like(given[0]), torch.ones(hidden, device="cuda")

    def both():
        outs = []
        for x in given:
            fused.part(rows).copy_(x)
            outs.append([t.clone() for t in fused(residual, weight, form=form)])
        return outs

    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = both()
    worst = 0.0
    for seed in range(20):
        made = [inputs(own, rows, hidden, 2 * seed + n, torch.bfloat16) for n in range(2)]
        for x, (parts, _, _) in zip(given, made, strict=True):
            x.copy_(parts[own.rank])
        residual.copy_(made[0][1])
        graph.replay()
        torch.cuda.synchronize()
        for out, (parts, _, _) in zip(outs, made, strict=True):
            exact = all_reduce_norm(parts, made[0][1], torch.ones(hidden))
            worst = max(worst, (out[0].cpu().float() - exact[0].float()).abs().max().item())
    return worst


def chained(own, form, rows, hidden, layers):
    """A residual stream through many calls, parts from ordinary memory, every second call without a norm; captured,
    and replayed with new numbers. The largest difference of the last sum over the replays."""
    group = own.group(range(own.world)).process_group
    fused = FusedAllReduce(group, rows, hidden, torch.bfloat16)
    given = torch.zeros(2 * layers, rows, hidden, dtype=torch.bfloat16, device="cuda")
    start, weight = torch.zeros_like(given[0]), torch.ones(hidden, device="cuda")

    def stream():
        x = start
        for n, part in enumerate(given):
            x, _ = fused(x, weight if n % 2 else None, form=form, part=part)
        return x.clone()

    stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = stream()
    worst = 0.0
    for seed in range(20):
        made = [inputs(own, rows, hidden, 100 * seed + n, torch.bfloat16)[0] for n in range(2 * layers)]
        given.copy_(torch.stack([parts[own.rank] for parts in made]))
        graph.replay()
        torch.cuda.synchronize()
        exact = torch.zeros(rows, hidden, dtype=torch.bfloat16)
        for parts in made:
            exact = all_reduce_norm(parts, exact, torch.ones(hidden))[0]
        worst = max(worst, (out.cpu().float() - exact.float()).abs().max().item())
    return worst


def own_rows(own, rows_list, hidden, dtype, rounds):
    """Many sums of own rows in a row, each with new numbers and everything that it hands out poisoned before, while the
    host does not wait: with a meeting at the end; without one, but with ids handed out; and between them a sum of whole
    rows. Returns the largest error of a sum (which has the reference's bits), the largest share of codes that are not
    the reference's, the largest relative error of a row that was handed out, and 1 if ids or weights are wrong."""
    group = own.group(range(own.world)).process_group
    sums = FusedAllReduce(group, max(rows_list), hidden, dtype)
    fused = FusedOwnRows(sums, group, 4)
    calls = [(seed, rows) for seed in range(rounds) for rows in rows_list]
    given = []
    for seed, rows in calls:
        ids = torch.randint(0, 128, (rows, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        given.append((*inputs(own, rows, hidden, seed, dtype), ids))
    sent = [(parts[own.rank].cuda(), *(x.cuda() for x in more)) for parts, *more in given]
    found = []
    torch.cuda.synchronize()
    for (seed, rows), (part, residual, weight, ids) in zip(calls, sent, strict=True):
        mine = slice(own_ranges(rows, own.world)[own.rank].start, own_ranges(rows, own.world)[own.rank].stop)
        fused._values.own.fill_(0x7F)                   # NaN; peers store here only after our next call has begun
        for scales in (fused._scales.own, fused._weights.own):
            scales.fill_(torch.nan)
        fused._ids.own.fill_(-7)
        if seed % 3 == 0:
            part = sums.part(rows).copy_(part)
        total, q = fused(part, residual[mine].contiguous(), weight, meet=seed % 2 == 0)
        chosen = None if seed % 2 == 0 else fused.hand_out(ids[mine].contiguous(), ids[mine] / 2, rows)
        found.append((total, q.values[:rows].clone(), q.scale[:rows].clone(),
                      None if chosen is None else tuple(x.clone() for x in chosen)))
        if seed % 3 == 1:
            sums(residual, None, part=part)
    return [max(worst) for worst in zip(*(
        _own_rows_errors(own, each, got) for each, got in zip(given, found, strict=True)), strict=True)]


def _own_rows_errors(own, given, found):
    (parts, residual, weight, ids), (total, values, scale, chosen) = given, found
    mine = own_ranges(len(residual), own.world)[own.rank]
    summed, codes, want = sum_own_rows(parts, residual, weight)
    error = (total.cpu().float() - summed[mine.start : mine.stop].float()).abs()
    apart = (values.cpu().view(torch.uint8) != codes.view(torch.uint8)).float().mean()
    exact = dequantise_groups(codes, want)
    rounded = (dequantise_groups(values.cpu(), scale.cpu()) - exact).norm(dim=1) / exact.norm(dim=1)
    wrong = chosen is not None and not (torch.equal(chosen[0].cpu(), ids)
                                        and torch.equal(chosen[1].cpu(), ids / 2))
    return [x.max().nan_to_num(1e9).item() if x.numel() else 0.0 for x in (error, apart, rounded)] + [float(wrong)]
