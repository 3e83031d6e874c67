"""`nanochat accept`: after a refactor, reuse an artifact that the old code built."""

import time
from dataclasses import asdict, replace
from typing import Annotated

from cyclopts import Parameter

from flows.artifacts.names import check_stage, open_artifact
from flows.artifacts.pins import pin
from flows.artifacts.publish import Published
from flows.artifacts.revocations import ancestors_revoked, one_line, this_person
from flows.artifacts.runs import timestamp
from flows.building.context import BuildContext
from flows.building.job import fetch_inputs, make_job, processes_of
from flows.cli.options import (
    DepthFlag,
    PlacementOptions,
    Positive,
    ProfileName,
    SetFlag,
    UseFlag,
    check_gpus,
)
from flows.cli.output import print_line, print_lines
from flows.cli.requests import plan_request, read_request
from flows.identity.ref import short
from flows.leases.file_lock import scratch_directory
from flows.plan.accept import Offer, find_offer
from flows.plan.accept import accept as accept_offer
from flows.plan.planned import Planned
from flows.plan.prove import STEPS, Proof
from flows.plan.prove import prove as prove_offer


def accept(
    profile: ProfileName,
    stage: str,
    /,
    *,
    why: str,
    origin: Annotated[str | None, Parameter(name="--from")] = None,
    prove: bool = False,
    steps: Positive = STEPS,
    depth: DepthFlag = None,
    overrides: SetFlag = (),
    use: UseFlag = (),
    where: PlacementOptions = PlacementOptions(),
) -> None:
    """Adopt an artifact after a refactor: the same files under today's fingerprint.

    Only code may differ from what it was built with, not configuration or inputs. The acceptance
    is recorded with the artifact.

    Args:
        stage: A stage, as `nanochat plan` lists it.
        why: Why the change decides nothing, in a line; it is recorded.
        origin: The artifact to adopt (sft/1a2b3c, sft@tiny). Default: the latest that fits.
        prove: First run old code and HEAD, and refuse unless they agree to the bit.
        steps: With --prove: steps of training that are compared.
    """
    request = read_request(profile, where, depth=depth, overrides=overrides, use=use)
    check_stage(stage)
    one_line(why)
    check_gpus(where.gpus)
    planned = plan_request(request, where, will_run=False)
    store = planned.store
    named = open_artifact(store, origin) if origin is not None else None
    offer = find_offer(store, planned.plan, stage, origin=named)
    if offer is None:
        print_line(f"{stage} is up to date: there is nothing to accept")
        return
    print_line(f"{offer.manifest.name}: {offer.what_changed}")
    used = [offer.manifest, *offer.inputs.values()]
    # Pinned before the proof, which may train for minutes: `nanochat gc` of another machine must
    # not delete the artifact, its inputs or the new manifest meanwhile.
    with pin(
        store,
        [*(manifest.ref for manifest in used), offer.identity.ref],
        why=f"nanochat accept {request.profile} {stage}",
        log=print_line,
        pause=time.sleep,
    ):
        proof = _prove(planned, offer, steps=steps) if prove else None
        accepted = accept_offer(
            store,
            offer,
            why=why,
            who=this_person(),
            when=timestamp(time.time()),
            proof=asdict(proof) if proof else None,
        )
    print_lines(_describe(accepted, proof))
    # An ancestor that was revoked does not prevent the acceptance, but must not go unnoticed.
    print_lines(f"warning: made from {r}" for r in ancestors_revoked(store, accepted.manifest))


def _prove(planned: Planned, offer: Offer, *, steps: int) -> Proof:
    """Run the stage's job as a build would, in a directory that is removed afterwards."""
    stage = offer.stage
    context = BuildContext(
        run=planned.profile.run,
        run_id="",
        placement=planned.placement,
        store=planned.store,
        watch=lambda stage, event: None,
        strict=True,
    )
    with (
        context.open_cache() as cache,
        scratch_directory(planned.placement.home) as scratch,
    ):
        inputs = fetch_inputs(stage, context, offer.inputs, cache, check=lambda: None)
        job = make_job(stage, context, offer.identity, inputs)
        return prove_offer(
            offer,
            replace(job, directory=scratch),
            # As a real run on this machine: sums over ranks depend on their number.
            processes=processes_of(stage, context),
            steps=steps,
            root=context.root,
            log=print_line,
        )


def _describe(accepted: Published, proof: Proof | None) -> list[str]:
    name = accepted.manifest.name
    if accepted.adopted:  # another process built or accepted the same fingerprint first
        other = accepted.divergence and f", with other contents; ours is {accepted.divergence}"
        return [f"{name} appeared meanwhile and is used{other or ''}"]
    if proof is None:
        return [f"accepted as {name}; nothing was compared"]
    commits = f"{short(proof.old_commit)} and {short(proof.new_commit)}"
    return [
        f"accepted as {name}",
        f"proven: {proof.compared} values and files are equal to the bit with the commits "
        f"{commits} on {proof.device}",
    ]
