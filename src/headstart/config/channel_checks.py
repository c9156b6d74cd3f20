"""What a stage asks of its channel and cannot have, in words: privacy, secure sums, robust means, compression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.config.stage import ClosedForm


def channel_errors(stage: Mapping[str, Any], kind: type[Any], tasks: bool) -> list[str]:
    """Keys of a stage's channel that do not go together, or not with its method, whose stages are of this kind;
    problems begin with the key they are about. tasks: whether there are several."""
    problems = []
    if "combine" in kind.model_fields:
        values = {**{name: field.default for name, field in kind.model_fields.items()}, **stage}
        problems += [f".{problem}" for problem in _protection_errors(values, kind, tasks)]
    if stage.get("secure") and "secure" in kind.model_fields:
        problems += [f".{problem}" for problem in _secure_errors(stage, kind, tasks)]
    if issubclass(kind, ClosedForm):
        problems += [f".{problem}" for problem in (*_closed_form_errors(stage, tasks), *_scatter_errors(stage))]
    if "privacy" in kind.model_fields and _noise_adder(stage) == "shared":
        problems += [f".privacy.noise: {problem}" for problem in _shared_noise_errors(stage, kind, tasks)]
    return problems


def _protection_errors(stage: Mapping[str, Any], kind: type[Any], tasks: bool) -> list[str]:
    """Why a training stage, given with its defaults, cannot withstand or hide single clients as it is asked to.

    Robust means, largest norms and noise are for the block `update`: what else a method sends is not covered.
    """
    method, problems, privacy = stage["method"], [], stage["privacy"]
    robust = {"combine": stage["combine"] != "mean", "max_norm": stage["max_norm"] is not None}
    others = [block for block in (*kind.sends, *kind.numbers) if block != "update"]
    given = {**robust, "privacy": privacy is not None, "compress": stage["compress"] is not None}
    for key in [key for key, asked in given.items() if asked]:
        if not kind.communicates:
            problems.append(f"{key}: with {method} no update travels that this could apply to; leave it out")
        elif others and key != "compress":
            verb = "hides" if key == "privacy" else "limits"
            problems.append(f"{key}: {method} sends {others[0]!r}, too, and nothing {verb} that; use another method")
    if kind.products:
        asked = [key for key in ("combine", "max_norm", "privacy") if given[key]]
        problems += [f"{key}: {method} also adds up the products of clients' factors; use fedavg" for key in asked]
    if robust["combine"] and "update" in kind.accumulates.values():
        problems.append(f"combine: what {method}'s clients accumulate adds up to the mean of the updates; use 'mean'")
    if robust["combine"] and stage["hide_task"]:
        problems.append("combine: with hide_task the server needs no more than sums; use 'mean'")
    if stage["compress"] in ("top-k", "sign") and kind.communicates:
        problems += [f"compress: {stage['compress']!r} {why}" for why in _feedback_errors(stage, kind)]
    if privacy is None or not kind.communicates:
        return problems
    if "update" in kind.accumulates.values():
        problems.append(
            f"privacy: {method}'s server adds up the updates of all rounds, and with them their noise; use another "
            "method"
        )
    if kind.twin or "personal" in (kind.representation, kind.classifier, kind.lora_b):
        problems.append(f"privacy: {method} leaves a model with each client that nothing hides; use another method")
    if robust["combine"]:
        problems.append("combine: privacy hides a client in a sum; use 'mean'")
    if stage["weighting"] != "uniform":
        problems.append("weighting: with privacy every client counts alike; use 'uniform'")
    if stage["share"]:
        problems.append("share: with privacy the server cannot hold examples of the clients; leave it 0")
    if stage["sampling"] == "tasks":
        problems.append("sampling: privacy is accounted for where all clients are drawn alike; use 'clients'")
    if tasks and isinstance(privacy, Mapping) and privacy.get("noise") == "client":
        problems.append("privacy.noise: with several tasks, what a client sends shows which is its own; use 'server'")
    return problems


def _feedback_errors(stage: Mapping[str, Any], kind: type[Any]) -> list[str]:
    """Why a client cannot add what was left out of an update to its next one."""
    reasons = {
        "adds what was left out of an update to the next, and privacy's noise is for each by itself": stage["privacy"],
        f"makes sums right, and combine = {stage['combine']!r} is none": stage["combine"] != "mean",
        f"adds rounds up, and {stage['method']} sends other values in its first rounds than in its last": kind.phased,
        f"adds rounds up, and {stage['method']} multiplies the factors of each": kind.products,
    }
    return [f"{why}; use 'int8' or leave it out" for why, holds in reasons.items() if holds]


def _secure_errors(stage: Mapping[str, Any], kind: type[Any], tasks: bool) -> list[str]:
    """Why the server of a stage cannot do with sums over clients."""
    problems, method = [], stage["method"]
    if not kind.communicates:
        problems.append(f"secure: with {method} nothing travels; leave it out")
    if method == "fedcof" and stage.get("covariance", "estimated") == "estimated" and "secure_group" not in stage:
        problems.append(
            "secure: fedcof needs the means of several clients for each class, which one sum over all hides; set "
            "secure_group, and each group counts as one client, or use fedncm or fed3r"
        )
    if stage.get("means_per_client", 1) != 1:
        problems.append("means_per_client: secure aggregation adds a client's parts together; use 1")
    if stage.get("combine", "mean") != "mean":
        problems.append(
            f"combine: {stage['combine']} looks at each client's update, which secure aggregation hides; use 'mean'"
        )
    if stage.get("compress"):
        problems.append("compress: with secure aggregation, masked values are 8 bytes whatever they were; leave it out")
    share = stage.get("secure_threshold", 1.0)
    if isinstance(share, float) and 0 < share <= 2 / 3:
        problems.append(
            f"secure_threshold: {share:g} is too low; a server that lies about who has dropped out could open one "
            "client's values unless more than two thirds have to stay: use 0.67 or more; four clients are the fewest "
            "that tolerate one absence"
        )
    if tasks and "hide_task" in kind.model_fields and not stage.get("hide_task"):
        problems.append("hide_task: sums over clients of several tasks need messages of one shape; set it to true")
    return problems


def _closed_form_errors(stage: Mapping[str, Any], tasks: bool) -> list[str]:
    """Why a closed form cannot hide single examples, blur its counts, or keep the statistics of clients, as asked."""
    problems = []
    estimated = stage.get("covariance", "estimated") == "estimated"
    on_total = _noise_adder(stage) in ("server", "shared")
    some = "clients_per_round" in stage or stage.get("participation", 1) != 1
    if on_total and some and not (stage["method"] == "fedcof" and estimated):
        problems.append(
            "privacy.noise: noise is added to a total once, and the heads of two rounds would differ by exact sums; "
            "sample all clients in one round (leave out clients_per_round and participation), or use 'client'"
        )
    if "privacy" in stage and stage.get("means_per_client", 1) != 1:
        problems.append("means_per_client: one example changes how all of its class is split; with privacy, use 1")
    if stage.get("keep_statistics"):
        hidden = stage.get("secure") or "privacy" in stage
        reasons = {
            "what single clients send is hidden, and cannot be kept or taken out again": hidden,
            "with several centres every client would have to participate again": stage.get("centres", 1) != 1,
            "the temperature would have to be fitted again; set it to a number": isinstance(
                stage.get("temperature"), str
            ),
            "it is for one task; give [data] instead of [[tasks]]": tasks,
        }
        problems += [f"keep_statistics: {why}; leave it out" for why, holds in reasons.items() if holds]
    if "privacy" in stage and stage.get("head") == "lda":
        problems.append("head: discriminants depend on the length of features, which privacy shortens; use 'ridge'")
    if stage.get("prior") == "uniform" and stage.get("head") != "lda":
        problems.append("prior: only head = 'lda' has one; set that, or leave prior out")
    if "privacy" in stage and stage.get("temperature") == "auto":
        problems.append(
            "temperature: losses of training examples would be sent without noise; with privacy, use 'validation', on "
            "the server's own data, or a number"
        )
    if "privacy" in stage and "count_noise" in stage:
        problems.append("count_noise: privacy puts noise on the counts already; set one of the two")
    if "count_noise" in stage and not estimated:
        problems.append("count_noise: second moments do not fit noisy counts; use covariance = 'estimated'")
    if "count_noise" in stage and stage.get("within", "auto") in ("trace", "diagonal"):
        problems.append("count_noise: second moments do not fit noisy counts; use within = 'estimated'")
    return problems


def _scatter_errors(stage: Mapping[str, Any]) -> list[str]:
    """Why clients of FedCOF cannot send what they are asked to of their scatter."""
    problems = []
    within, rank = stage.get("within", "auto"), stage.get("rank", 0)
    if stage.get("covariance", "estimated") != "estimated":
        given = [key for key, other in (("within", within != "auto"), ("rank", rank)) if other]
        return [f"{key}: covariance = {stage['covariance']!r} is exact already; leave {key} out" for key in given]
    if rank and within == "estimated":
        problems.append("rank: directions are sent beside a trace or a diagonal; use within = 'auto', or rank = 0")
    if rank and "count_noise" in stage:
        problems.append("rank: noise on counts does not hide directions; use rank = 0")
    return problems


def _noise_adder(stage: Mapping[str, Any]) -> str | None:
    """Who adds the noise of a stage; None where there is none."""
    privacy = stage.get("privacy")
    return str(privacy.get("noise", "server")) if isinstance(privacy, Mapping) else None


def _shared_noise_errors(stage: Mapping[str, Any], kind: type[Any], tasks: bool) -> list[str]:
    """Why clients cannot share the noise of a stage."""
    problems = []
    if not stage.get("secure"):
        problems.append("clients share the noise of secure aggregation; set secure = true, or use 'client'")
    if stage["method"] == "fedcof" and stage.get("covariance", "estimated") == "estimated":
        problems.append("fedcof needs every client's means, which have noise of their own; use 'client' or 'server'")
    if tasks:
        problems.append("clients share the noise of one task; give [data] instead of [[tasks]], or use 'server'")
    if getattr(kind, "phased", False):
        problems.append(f"{stage['method']} sends other values in its first rounds than in its last; use 'server'")
    return problems
