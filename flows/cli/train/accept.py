"""`nanochat accept`: after a refactor, reuse an artifact that the old code built."""

import time
from typing import Annotated

from cyclopts import Parameter

from flows.artifacts.cache import fetch
from flows.artifacts.names import check_stage, open_artifact
from flows.artifacts.pins import pin
from flows.artifacts.revocations import ancestors_revoked, one_line, this_person
from flows.artifacts.runs import timestamp
from flows.cli.options import (
    DepthFlag,
    PlacementOptions,
    Positive,
    ProfileName,
    SetFlag,
    StageName,
    UseFlag,
    check_gpus,
)
from flows.cli.output import print_lines
from flows.cli.requests import plan_request, read_request
from flows.identity.fingerprint import REPOSITORY
from flows.identity.ref import short
from flows.plan.accept import Acceptance, Offer, find_offer, prove_offer
from flows.plan.accept import accept as accept_offer
from flows.plan.planned import Planned
from flows.plan.prove import STEPS, Proof


def accept(
    profile: ProfileName,
    stage: StageName,
    /,
    *,
    why: Annotated[
        str, Parameter(help="Why the change decides nothing, in a line; it is recorded.")
    ],
    origin: Annotated[
        str | None,
        Parameter(
            name="--from",
            help="The artifact to take over (sft/1a2b3c, sft@tiny). Default: the latest that fits.",
        ),
    ] = None,
    prove: Annotated[
        bool,
        Parameter(
            negative="", help="First run old and new code, and refuse unless they agree to the bit."
        ),
    ] = False,
    steps: Annotated[
        Positive, Parameter(help="With --prove: steps of training that are compared.")
    ] = STEPS,
    depth: DepthFlag = None,
    overrides: SetFlag = (),
    use: UseFlag = (),
    where: PlacementOptions = PlacementOptions(),  # noqa: B008 - frozen
) -> int:
    """Take an artifact over after a refactor: the same files under today's fingerprint.

    Only code may differ from what it was built with, not configuration or inputs. The acceptance
    is recorded with the artifact.
    """
    request = read_request(profile, where, depth=depth, overrides=overrides, use=use)
    check_stage(stage)
    one_line(why)
    check_gpus(where.gpus)
    planned = plan_request(request, where)
    store = planned.store
    named = open_artifact(store, origin) if origin is not None else None
    offer = find_offer(store, planned.plan, stage, origin=named)
    if offer is None:
        print_lines([f"{stage} is up to date: there is nothing to accept"])
        return 0
    print_lines([f"{offer.manifest.name}: {offer.what_changed}"])
    used = [offer.manifest, *offer.inputs.values()]
    # Pinned before the proof, which may train for minutes: `nanochat gc` of another machine must
    # not delete the artifact, its inputs or the new manifest meanwhile.
    with pin(
        store,
        [*(manifest.ref for manifest in used), offer.identity.ref],
        why=f"nanochat accept {request.profile} {stage}",
        log=lambda text: print_lines([text]),
        pause=time.sleep,
    ):
        proof = _prove(planned, offer, where, steps=steps) if prove else None
        accepted = accept_offer(
            store, offer, why=why, who=this_person(), when=timestamp(time.time()), proof=proof
        )
    print_lines(_describe(offer, accepted, proof))
    # An ancestor that was revoked does not prevent the acceptance, but must not go unnoticed.
    print_lines(f"warning: made from {r}" for r in ancestors_revoked(store, accepted.manifest))
    return 0


def _prove(planned: Planned, offer: Offer, where: PlacementOptions, *, steps: int) -> Proof:
    with where.cache as cache:
        return prove_offer(
            offer,
            planned.profile.run,
            placement=planned.placement,
            inputs={n: fetch(planned.store, m, cache) / "files" for n, m in offer.inputs.items()},
            steps=steps,
            root=REPOSITORY,
            log=lambda text: print_lines([text]),
        )


def _describe(offer: Offer, accepted: Acceptance, proof: Proof | None) -> list[str]:
    name = accepted.manifest.name
    if accepted.adopted:  # another process built or accepted the same fingerprint first
        other = (
            f", with other contents; ours is {accepted.divergence}" if accepted.divergence else ""
        )
        return [f"{name} appeared meanwhile and is used{other}"]
    if proof is None:
        return [f"accepted as {name}; nothing was compared"]
    what = f"{proof.compared} files"
    if proof.kind == "steps":
        state = ", weights and optimizer too" if proof.with_state else ""
        what = f"{proof.steps} steps, {proof.compared} values{state}"
    return [
        f"accepted as {name}",
        f"proven: {what}, equal to the bit with commit {short(proof.old_commit)} and today's code "
        f"on {proof.device}",
    ]
