"""Finds the parts of a model that techniques reach into, without knowing the model.

Read from the module tree, Hugging Face's own hints where they exist, and names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from thrice.errors import ConfigError, Problem


@dataclass(frozen=True, kw_only=True)
class Block:
    """One of the repeated parts. Names are those of `model.named_modules()`."""

    name: str
    module: nn.Module
    attention: nn.Module | None
    """The outermost module in it that is an attention, if it has one."""


def blocks(model: nn.Module) -> tuple[Block, ...]:
    """The repeated blocks, in the order in which the model holds them.

    Hugging Face's `_no_split_modules` names their classes where it exists; elsewhere they are the children of
    the list (or sequence of composite modules) of one class that holds the most parameters.

    Raises ConfigError where there is nothing of the kind.
    """
    hint = set(getattr(model, "_no_split_modules", None) or ())
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in hint]
    if len({type(module) for _, module in found}) != 1:
        found = max(_lists(model), key=lambda children: _size(*(m for _, m in children)), default=[])
    if not found:
        raise ConfigError(
            [
                Problem(
                    key="model",
                    value=type(model).__name__,
                    why="no repeated blocks were found in it: no ModuleList or Sequential whose children share "
                    "a class and hold parameters",
                    fix="keep the repeated layers in one nn.ModuleList, or leave out whichever of recompute, compile "
                    "and the optimizer muon is asked for: they work by block",
                )
            ]
        )
    return tuple(Block(name=name, module=module, attention=_attention(module)) for name, module in found)


def head(model: nn.Module) -> nn.Linear:
    """The linear layer that turns the last hidden states into logits over the vocabulary.

    Hugging Face's `get_output_embeddings` names it where it exists; elsewhere it is the one linear layer called
    `head` or `lm_head`. Raises ConfigError where there is none, or more than one.
    """
    hints = [getattr(module, "get_output_embeddings", None) for module in model.modules()]
    found = {hint() for hint in hints if hint is not None} - {None}
    if not found:
        found = {module for name, module in model.named_modules() if name.rpartition(".")[2] in ("head", "lm_head")}
    linear = [module for module in found if isinstance(module, nn.Linear)]
    if len(linear) != 1:
        raise ConfigError(
            [
                Problem(
                    key="model",
                    value=type(model).__name__,
                    why=f"{len(linear) or 'no'} output layers were found in it: no get_output_embeddings() that "
                    "returns an nn.Linear, and no single nn.Linear called head or lm_head",
                    fix="call the nn.Linear that makes the logits head, or leave out what works on it "
                    '(vocabulary_loss = "whole")',
                )
            ]
        )
    return linear[0]


def _lists(model: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = [(f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children()]
        one_class = len({type(child) for _, child in children}) == 1
        composite = any(next(child.children(), None) is not None for _, child in children)
        if one_class and _size(module) and (composite or isinstance(module, nn.ModuleList)):
            yield children


def _size(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _attention(block: nn.Module) -> nn.Module | None:
    module: nn.Module
    for name, module in block.named_modules():
        label = f"{name.rpartition('.')[2]} {type(module).__name__}"
        if name and re.search(r"attn|attention", label, re.I) and not re.search(r"norm|dropout", label, re.I):
            return module
    return None
