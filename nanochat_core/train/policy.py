"""The objective of RL: sampled answers, their advantages, and the objective's gradients.

With N sampled tokens in a step's answers on all ranks, the objective, which is minimised, is

    sum over sampled tokens of  -min(ratio * A, clip(ratio, 1 - clip, 1 + clip) * A)
                                + kl_weight * (r - log r - 1),                          over N

A: the answer's advantage; ratio: p(token) over what it was when the answers were sampled (PPO,
arXiv 1707.06347); r: p(token) of the reference model over p(token), whose term is Schulman's k3
estimate of the KL divergence (as GRPO has it, arXiv 2402.03300). On the first update of a batch the
ratio is 1 and its gradient that of A * log p(token): without clip and KL that is nanochat's rule.

Shapes: R rows, one per answer, T tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.train.loop.step import IGNORE

GPU_LENGTHS = 128  # a block of attention kernels


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled answer."""

    prompt: list[int]
    answer: list[int]
    mask: list[int]  # of `answer`: 1 sampled, 0 forced by a tool
    reward: float
    advantage: float  # reward less the baseline of its group


@dataclass(frozen=True, kw_only=True)
class ReferenceLogProbs:
    """Log-probabilities that an update is compared with, of the answers in their order.

    Each tensor is (A,) fp32 on the host: log p of an answer's A tokens, 0 where a tool forced it.
    """

    old: Sequence[Tensor] | None  # when the answers were sampled; None: by the present weights
    reference: Sequence[Tensor] | None  # of the frozen reference model; None: without a KL term
    clip: float | None  # None: the ratio is not clipped
    kl_weight: float


def advantages_of(rewards: Sequence[float], baseline: str) -> list[float]:
    """Return each reward of a group less its baseline; exactly 0 for all if all are equal.

    "group_mean": the mean of the group. "leave_one_out": the mean of the others, which does not
    depend on the answer itself, so that the gradient is unbiased (arXiv 2402.14740).
    """
    # 0.1 - mean([0.1] * 3) is not 0 in floats, and only an exact 0 is left out of the passes.
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    total, count = sum(rewards), len(rewards)
    if baseline == "leave_one_out":
        return [reward - (total - reward) / (count - 1) for reward in rewards]
    return [reward - total / count for reward in rewards]


def drop_equal_groups(rollouts: Sequence[Rollout], group_size: int) -> list[Rollout]:
    """Return the rollouts of groups whose rewards differ; `rollouts` holds group after group."""
    kept: list[Rollout] = []
    for first in range(0, len(rollouts), group_size):
        group = rollouts[first : first + group_size]
        if len({rollout.reward for rollout in group}) > 1:
            kept += group
    return kept


def count_sampled(rollouts: Sequence[Rollout], world: World, device: torch.device) -> Tensor:
    """Return the number of sampled tokens on all ranks, at least 1: a scalar. Collective."""
    sampled = torch.tensor(float(sum(sum(r.mask) for r in rollouts)), device=device)
    return world.sum(sampled).clamp(min=1)


def micro_batches(
    rollouts: Sequence[Rollout],
    ref_log_probs: ReferenceLogProbs | None,
    *,
    device_batch_size: int,
) -> Iterator[tuple[list[int], bool]]:
    """Yield indices of at most `device_batch_size` answers, and whether they are this rank's last.

    An answer whose advantage is 0 has a gradient only with a KL term, and is left out without.
    """
    pulled = ref_log_probs is not None and ref_log_probs.reference is not None
    useful = [i for i, r in enumerate(rollouts) if any(r.mask) and (pulled or r.advantage)]
    # Answers of like length in a micro-step: less of it is padding.
    useful.sort(key=lambda i: len(rollouts[i].prompt + rollouts[i].answer))
    for first in range(0, len(useful), device_batch_size):
        HEARTBEAT.beat("gradients")
        yield useful[first : first + device_batch_size], first + device_batch_size >= len(useful)


def policy_loss(
    model: GPT,
    rollouts: Sequence[Rollout],
    ids: Sequence[int],
    ref_log_probs: ReferenceLogProbs | None,
    num_tokens: Tensor,
) -> Tensor:
    """Return the share of the answers `ids` in the objective: a scalar, differentiable.

    `num_tokens`: the N of the objective. Without `ref_log_probs` the value is that of
    -A * log p(token), which has the same gradient.
    """
    batch = [rollouts[i] for i in ids]
    device = num_tokens.device
    tokens_RT, targets_RT = (t.to(device) for t in pad_for(model, batch))
    advantage_R1 = torch.tensor([[r.advantage] for r in batch], device=device)
    if ref_log_probs is None:
        return model.summed_loss(tokens_RT, targets_RT, advantage_R1 / num_tokens)
    old_RT, reference_RT = (
        place(of, ids, rollouts, tokens_RT) for of in (ref_log_probs.old, ref_log_probs.reference)
    )
    terms_RT = anchored_terms(
        -model.token_losses(tokens_RT, targets_RT),
        advantage_R1,
        old=old_RT,
        reference=reference_RT,
        ref_log_probs=ref_log_probs,
    )
    return terms_RT.masked_fill(targets_RT == IGNORE, 0.0).sum() / num_tokens


def anchored_terms(
    logp: Tensor,
    advantage: Tensor,
    *,
    old: Tensor | None,
    reference: Tensor | None,
    ref_log_probs: ReferenceLogProbs,
) -> Tensor:
    """Return the objective's term of every token, (R, T) fp32.

    `logp`, `old`, `reference`: log-probabilities (R, T); `advantage`: (R, 1). Where the ratio is
    clipped, a term's gradient is 0 if it would move the ratio further from 1.
    """
    # Without `old` the ratio is 1 in value, and its gradient is that of log p.
    ratio = (logp - (logp.detach() if old is None else old)).exp()
    terms = -ratio * advantage
    if ref_log_probs.clip is not None:
        near = ratio.clamp(1 - ref_log_probs.clip, 1 + ref_log_probs.clip)
        # The larger loss is the smaller gain: PPO's min, with the sign flipped.
        terms = torch.maximum(terms, -near * advantage)
    if reference is not None:
        difference = reference - logp
        # k3: r - 1 - log r, never negative; expm1 keeps its digits where r is near 1.
        terms = terms + ref_log_probs.kl_weight * (difference.expm1() - difference)
    return terms


@torch.no_grad()
def log_probs(model: GPT, rollouts: Sequence[Rollout], *, device_batch_size: int) -> list[Tensor]:
    """Return log p of every answer's tokens, (A,) fp32 on the host, 0 where a tool forced one.

    In evaluation mode: a model that is trained in fp8 computes them in bf16, as it sampled.
    """
    device = next(model.parameters()).device
    found = [torch.empty(0)] * len(rollouts)
    order = [i for i, r in enumerate(rollouts) if r.answer]
    order.sort(key=lambda i: len(rollouts[i].prompt + rollouts[i].answer))
    model.eval()
    for first in range(0, len(order), device_batch_size):
        HEARTBEAT.beat("log-probabilities")
        ids = order[first : first + device_batch_size]
        batch = [rollouts[i] for i in ids]
        tokens_RT, targets_RT = (t.to(device) for t in pad_for(model, batch))
        # In bf16 on a CPU a pass without gradients rounds more: ratios would not begin at 1.
        with torch.set_grad_enabled(model.numerics.precision == "bf16" and device.type == "cpu"):
            logp_RT = -model.token_losses(tokens_RT, targets_RT).detach().cpu()
        for row, (i, r) in enumerate(zip(ids, batch, strict=True)):
            begin = len(r.prompt) - 1  # where the first token of the answer is predicted
            found[i] = logp_RT[row, begin : begin + len(r.answer)].clone()
    return found


def place(
    values: Sequence[Tensor] | None, ids: Sequence[int], rollouts: Sequence[Rollout], like: Tensor
) -> Tensor | None:
    """Put the answers' values (A,) where `pad` has their targets: (R, T) fp32, 0 elsewhere."""
    if values is None:
        return None
    placed = torch.zeros(like.shape)
    for row, i in enumerate(ids):
        begin = len(rollouts[i].prompt) - 1  # targets are shifted by one
        placed[row, begin : begin + len(values[i])] = values[i]
    return placed.to(like.device)


def pad_for(model: GPT, batch: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of `pad` in few lengths where each new one has a cost: on a GPU
    attention is compiled or planned for a length."""
    is_on_cpu = model.lm_head.weight.device.type == "cpu"
    return pad(batch, model.config.sequence_len, multiple=1 if is_on_cpu else GPU_LENGTHS)


def pad(batch: Sequence[Rollout], longest: int, *, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (R, T) int64, padded on the right; targets are sampled tokens.

    T is a multiple of `multiple`, unless that is more than `longest`.
    """
    # The last token predicts nothing, so a row is one shorter than prompt and answer.
    length = max(len(r.prompt) + len(r.answer) for r in batch) - 1
    assert length <= longest, f"an answer and its prompt are {length + 1} tokens, not {longest}"
    length = min(-(-length // multiple) * multiple, longest)
    tokens_RT = torch.zeros(len(batch), length, dtype=torch.int64)
    targets_RT = torch.full((len(batch), length), IGNORE, dtype=torch.int64)
    for i, r in enumerate(batch):
        ids = torch.tensor(r.prompt + r.answer)
        mask = torch.tensor([0] * len(r.prompt) + r.mask)
        n = len(ids) - 1
        tokens_RT[i, :n] = ids[:n]
        targets_RT[i, :n] = ids[1 : n + 1].masked_fill(mask[1 : n + 1] == 0, IGNORE)
    return tokens_RT, targets_RT
