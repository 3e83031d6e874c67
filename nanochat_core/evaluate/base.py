"""Stage `base_eval`: bits per byte of the base model, and what it makes of a few prompts.

Writes scores.json {format, val_bpb, train_bpb} and samples.jsonl {prompt, text}, `text` being the
greedy continuation without the prompt.
"""

from typing import Any

from nanochat_core.config import BaseEvalConfig
from nanochat_core.data.row_files import Rows
from nanochat_core.engine.engine import Engine
from nanochat_core.evaluate.bits_per_byte import bits_per_byte
from nanochat_core.evaluate.records import write_records
from nanochat_core.job import Job, write_json
from nanochat_core.model.checkpoint import load_model
from nanochat_core.runtime.device import open_device
from nanochat_core.runtime.distributed import open_world
from nanochat_core.runtime.progress import Progress
from nanochat_core.tokenizer.bpe import Tokenizer

FORMAT = 1
DECIMALS = 5  # of a score: fp32 losses near 10 differ by 1e-6 with the device batch


def run(job: Job) -> dict[str, Any]:
    """Judge the base model. Raises ModelError or DataError when an input is of no use."""
    config = BaseEvalConfig.from_tree(job.config["base_eval"])
    world = open_world(job.resources.device)
    device = open_device(job.resources, local_rank=world.local_rank)
    progress = Progress(job.events, active=world.is_first)
    model = load_model(job.model_input, device)
    tokenizer = Tokenizer.load(job.model_input / "tokenizer")
    splits = ("val", "train")
    progress.start(len(splits) + 1, unit="part")
    scores: dict[str, float] = {}
    for done, split in enumerate(splits, start=1):
        rows = Rows.open(job.inputs["rows"], split)
        rows.check_tokenizer(tokenizer.digest())
        bpb = bits_per_byte(
            model,
            rows,
            tokenizer.token_bytes(),
            num_tokens=config.eval_tokens,
            batch_size=job.resources.device_batch_size,
            world=world,
        )
        scores[f"{split}_bpb"] = round(bpb, DECIMALS)
        progress.step(done, **scores)
    if world.is_first:
        engine = Engine(model, tokenizer)
        texts = continuations(engine, config.prompts, max_new_tokens=config.max_new_tokens)
        samples = [
            {"prompt": prompt, "text": text}
            for prompt, text in zip(config.prompts, texts, strict=True)
        ]
        write_records(job.output / "samples.jsonl", samples)
        write_json(job.output / "scores.json", {"format": FORMAT, **scores})
    progress.step(len(splits) + 1, **scores)
    return dict(scores)


def continuations(engine: Engine, prompts: tuple[str, ...], *, max_new_tokens: int) -> list[str]:
    """What the model writes after each prompt, taking the likeliest token each time."""
    tokenizer = engine.tokenizer
    groups = engine.complete(
        [[tokenizer.bos, *tokenizer.encode(prompt)] for prompt in prompts],
        num_samples=1,
        max_tokens=max_new_tokens,
        temperature=0.0,
        top_k=None,
        seeds=[0] * len(prompts),  # greedy: no randomness is drawn
    )
    return [tokenizer.decode(completion.ids) for [completion] in groups]
