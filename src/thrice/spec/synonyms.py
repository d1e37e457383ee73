"""What to say to a key that is not ours: the nearest spelling, its right place, another framework's name.

Sources of the names: Hugging Face's TrainingArguments and model configs, Accelerate, DeepSpeed's JSON,
torchtitan's TOML, Megatron-LM's arguments, nanoGPT's train.py, Lightning's Trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from thrice.errors import Problem
from thrice.spec.convert import Unfit, assign, convert

SAME = {
    # batch, sequence and length of the run
    "per_device_train_batch_size": "micro_batch",
    "per_gpu_train_batch_size": "micro_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "local_batch_size": "micro_batch",
    "micro_batch_size": "micro_batch",
    "device_batch_size": "micro_batch",
    "train_batch_size": "global_batch",
    "global_batch_size": "global_batch",
    "gradient_accumulation_steps": "grad_accum_steps",
    "accumulate_grad_batches": "grad_accum_steps",
    "block_size": "sequence",
    "seq_length": "sequence",
    "seq_len": "sequence",
    "sequence_length": "sequence",
    "context_length": "sequence",
    "max_seq_len": "sequence",
    "max_seq_length": "sequence",
    "max_iters": "max_steps",
    "train_iters": "max_steps",
    "train_steps": "max_steps",
    "num_steps": "max_steps",
    "training.steps": "max_steps",
    # optimizer and schedule
    "learning_rate": "lr",
    "peak_lr": "lr",
    "max_lr": "lr",
    "optim": "optimizer.name",
    "optimizer.type": "optimizer.name",
    "wd": "optimizer.weight_decay",
    "adam_epsilon": "optimizer.eps",
    "adam_eps": "optimizer.eps",
    "adam_betas": "optimizer.betas",
    "sgd_momentum": "optimizer.momentum",
    "max_grad_norm": "optimizer.clip",
    "max_norm": "optimizer.clip",
    "gradient_clipping": "optimizer.clip",
    "gradient_clip_val": "optimizer.clip",
    "grad_clip": "optimizer.clip",
    "clip_grad": "optimizer.clip",
    "lr_scheduler_type": "schedule.decay",
    "lr_decay_style": "schedule.decay",
    "decay_type": "schedule.decay",
    "lr_scheduler": "schedule.decay",
    "scheduler": "schedule.decay",
    "warmup_iters": "schedule.warmup_steps",
    "lr_warmup_iters": "schedule.warmup_steps",
    "num_warmup_steps": "schedule.warmup_steps",
    "warmup_num_steps": "schedule.warmup_steps",
    "min_lr_factor": "schedule.min_lr_ratio",
    "lr_warmup_samples": "schedule.warmup_samples",
    "wsd_decay_steps": "schedule.decay_steps",
    # the decoder
    "num_hidden_layers": "decoder.layers",
    "num_layers": "decoder.layers",
    "n_layers": "decoder.layers",
    "n_layer": "decoder.layers",
    "hidden_size": "decoder.hidden",
    "n_embd": "decoder.hidden",
    "d_model": "decoder.hidden",
    "num_attention_heads": "decoder.heads",
    "n_heads": "decoder.heads",
    "n_head": "decoder.heads",
    "num_key_value_heads": "decoder.kv_heads",
    "num_query_groups": "decoder.kv_heads",
    "n_kv_heads": "decoder.kv_heads",
    "intermediate_size": "decoder.mlp_hidden",
    "ffn_hidden_size": "decoder.mlp_hidden",
    "max_position_embeddings": "decoder.max_positions",
    "n_positions": "decoder.max_positions",
    "vocab_size": "decoder.vocabulary",
    "tie_word_embeddings": "decoder.tied",
    "hidden_dropout": "decoder.dropout",
    "rotary_base": "decoder.rope_theta",
    "rms_norm_eps": "decoder.norm_eps",
    "layer_norm_eps": "decoder.norm_eps",
    "norm_epsilon": "decoder.norm_eps",
    # techniques
    "mixed_precision": "precision.mode",
    "dtype": "precision.mode",
    "torch_dtype": "precision.mode",
    "initial_loss_scale": "precision.initial_scale",
    "loss_scale_window": "precision.growth_interval",
    "attn_implementation": "attention.kernel",
    "attention_backend": "attention.kernel",
    # the run and its machine
    "random_seed": "seed",
    "output_dir": "run_dir",
    "out_dir": "run_dir",
    "default_root_dir": "run_dir",
    "dump_folder": "run_dir",
    "num_processes": "processes",
    "nproc_per_node": "processes",
    "world_size": "processes",
    "num_gpus": "processes",
    "devices": "processes",
    "data_parallel_size": "data_parallel.degree",
    "data_parallel_replicate_degree": "data_parallel.degree",
    "tensor_parallel_degree": "tensor_parallel",
    "tensor_model_parallel_size": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "pipeline_parallel_degree": "pipeline_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "pp_size": "pipeline_parallel",
    "context_parallel_degree": "context_parallel",
    "context_parallel_size": "context_parallel",
    "cp_size": "context_parallel",
    "dataset": "data",
    "train_file": "data",
    "data_path": "data",
    "tokenizer_name": "tokenizer",
    "logging_steps": "log_every",
    "log_interval": "log_every",
    "log_every_n_steps": "log_every",
    "log_freq": "log_every",
    "steps_per_print": "log_every",
    "save_steps": "checkpoint.every_steps",
    "save_interval": "checkpoint.every_steps",
    "checkpoint.interval": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "keep_latest_k": "checkpoint.keep_last",
    "eval_steps": "evaluation.every_steps",
    "eval_interval": "evaluation.every_steps",
}
"""Another framework's key -> ours that means the same, in the same unit."""

_DEEPEST = 3
"""A foreign table is taken apart this far; in YAML one can contain itself."""

_AMOUNT = "say how long to train with max_steps (optimizer steps) or max_tokens"
_BETAS = "both of AdamW's decay rates are one key, optimizer.betas = [0.9, 0.95]"
_RECOMPUTE = 'recompute = "full" recomputes every block; "none" or no key keeps all activations'

_ZERO = "zero_stage = 1 divides the optimizer's states among the processes, 2 gradients too"

ADVICE = {
    "batch_size": "say micro_batch (samples per device and backward) or global_batch (samples per step)",
    "num_train_epochs": _AMOUNT,
    "max_epochs": _AMOUNT,
    "num_epochs": _AMOUNT,
    "epochs": _AMOUNT,
    "train_samples": _AMOUNT,
    "rampup_batch_size": "[batch_ramp] start, increment and samples: the global batch of the first step, by how much "
    "it grows, and over how many samples",
    "auto_find_batch_size": 'micro_batch = "auto" takes the largest that fits and pays',
    "ddp": "processes = 4 is enough: processes without more are replicas of the whole model (data_parallel)",
    "zero_optimization": _ZERO,
    "zero": _ZERO,
    "fsdp": _ZERO,
    "fsdp_config": _ZERO,
    "torch_compile": 'compile = "blocks" compiles block by block',
    "use_flash_attn": 'attention = "sdpa" takes torch\'s fused kernels, "flash" our blockwise reference',
    "use_liger_kernel": 'vocabulary_loss = "chunked" is the loss that never holds the whole logits in float32',
    "adam8bit": 'optimizer_states = "8bit"',
    "adamw_8bit": 'optimizer_states = "8bit"',
    "optim_in_backward": "optimizer_in_backward = true",
    "warmup_ratio": "warm-up is counted in steps: schedule.warmup_steps = ratio * max_steps",
    "min_lr": "the end of the decay is a share of the peak: schedule.min_lr_ratio = min_lr / lr",
    "lr_decay_iters": "the decay always ends with the run; leave it out",
    "decay_lr": 'schedule.decay = "constant" in place of false; leave it out otherwise',
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "beta1": _BETAS,
    "beta2": _BETAS,
    "bf16": 'precision = "bf16" in place of bf16 = true; leave it out otherwise',
    "fp16": 'precision = "fp16" in place of fp16 = true; leave it out otherwise',
    "loss_scale": "fp16 always scales the loss dynamically; its first scale is precision.initial_scale",
    "gradient_checkpointing": _RECOMPUTE,
    "activation_checkpointing": _RECOMPUTE,
    "activation_checkpoint": _RECOMPUTE,
    "recompute_granularity": _RECOMPUTE,
    "recompute_activations": _RECOMPUTE,
    "attention_dropout": "decoder.dropout is the model's one dropout",
    "eval_strategy": "evaluation.every_steps says how often; one evaluation is always made at the end",
    "evaluation_strategy": "evaluation.every_steps says how often; one evaluation is always made at the end",
    "save_strategy": "checkpoint.every_steps says how often; one checkpoint is always written at the end",
    "vary": "thrice compare FILE --vary KEY=A,B trains FILE once for each value; in a file it belongs to [compare]",
    "seeds": "thrice compare FILE --vary KEY=A,B --seeds 3 takes several; one run has one seed",
    "out": "a run's folder is run_dir; --out is where thrice compare keeps its runs",
    "resume_from_checkpoint": "resuming is asked for on the command line, with --resume",
}
"""A key of another framework, or of another command, that has no equal here -> what to do."""

NOT_YET = {
    "offload": ("offload_optimizer", "offload_param", "cpu_offload"),
}
"""thrice's keys that this version does not have -> other names for the same thing."""


def unknown(key: str, value: object, hints: Mapping[str, Any], tables: Mapping[str, type[Any]]) -> Iterator[Problem]:
    """What is wrong with a dotted `key` that is none of `hints`; a foreign table has one for each key."""
    head = key.partition(".")[0]
    last = key.rpartition(".")[2]
    if head == "compare" and head not in tables:
        why = "it describes an experiment of several runs, and this command makes one"
        yield Problem(key=key, value=_plain(value), why=why, fix="thrice compare FILE runs it; leave it out otherwise")
        return
    for ours, others in NOT_YET.items():
        if {head, last} & {ours, *others}:
            why = f"thrice has no {ours} in this version"
            yield Problem(key=key, value=_plain(value), why=why, fix="leave it out")
            return
    target = SAME.get(key) or SAME.get(last)
    advice = ADVICE.get(last) or ADVICE.get(head)
    if isinstance(value, dict) and value and not advice and key.count(".") < _DEEPEST:
        for inner, given in value.items():
            dotted = f"{key}.{inner}"
            yield from unknown(dotted, given, hints, tables)
        return
    why = "there is no such key"
    if target:
        fix = _set(target, value, hints, tables)
        why += f"; other frameworks' {last} is {target} here"
    elif advice:
        fix = advice
    else:
        near = _nearest(key, hints, tables)
        fix = " or ".join(_set(each, value, hints, tables) for each in near)
        if near and near[0].rpartition(".")[2] == last:
            table = near[0].rpartition(".")[0]
            why += f" here; {last} belongs to {f'the table {table}' if table else 'the top level'}"
    yield Problem(key=key, value=_plain(value), why=why, fix=fix)


def _nearest(key: str, hints: Mapping[str, Any], tables: Mapping[str, type[Any]]) -> list[str]:
    """The same name elsewhere, each place of it; or else the one most alike, its own table first."""
    head, _, last = key.rpartition(".")
    candidates = [*hints, *tables]
    elsewhere = [each for each in candidates if each.rpartition(".")[2] == last]
    if elsewhere:
        return elsewhere
    beside = {each.rpartition(".")[2]: each for each in candidates if each.rpartition(".")[0] == head}
    anywhere = {each.rpartition(".")[2]: each for each in candidates}
    for names, cutoff in ((beside, 0.6), (anywhere, 0.75)):
        close = get_close_matches(last, names, n=1, cutoff=cutoff)
        if close:
            return [names[close[0]]]
    return []


def _set(target: str, value: object, hints: Mapping[str, Any], tables: Mapping[str, type[Any]]) -> str:
    """How to set `target` to `value`; the name alone where the value would not do there either."""
    field = f"{target}.{fields(tables[target])[0].name}" if target in tables else target
    try:
        convert(value, hints[field], field)
    except Unfit as unfit:
        return unfit.fix or target
    except KeyError:
        return target
    return assign(target, value, value)


def _plain(value: object) -> object:
    """A table is not shown: its keys say enough."""
    return None if isinstance(value, dict) else value
