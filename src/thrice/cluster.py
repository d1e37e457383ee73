"""Job files that start one run on several machines: SLURM, Kubernetes, SkyPilot."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from thrice.errors import UsageError
from thrice.spec.job import Job

PORT = 29500
"""torchrun's own; each pod or machine of ours has an address of its own, so it is free."""


def emit(kind: str, job: Job, arguments: Sequence[str], nodes: int) -> str:
    """The job file of `kind` that runs `thrice train` with `arguments` on `nodes` machines.

    Each has the same number of processes. Raises UsageError for another kind, or nodes that do not divide them.
    """
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"--emit {kind}: there is no such job file\n  {meant}there are: {', '.join(KINDS)}")
    if job.processes % nodes:
        fitting = [str(count) for count in range(1, job.processes + 1) if job.processes % count == 0]
        raise UsageError(
            f"--nodes {nodes}: processes = {job.processes} does not divide by it, and every machine has as many\n"
            f"  --nodes {', '.join(fitting)}; or processes = {nodes * max(1, round(job.processes / nodes))}"
        )
    train = ["train", *arguments, "--processes", str(job.processes), "--resume"]
    name = re.sub("[^a-z0-9]+", "-", f"thrice {Path(job.run_dir or 'run').name}".lower()).strip("-")[:50].strip("-")
    return KINDS[kind](name, shlex.join(train), nodes, job.processes // nodes)


def slurm(name: str, train: str, nodes: int, on_each: int) -> str:
    return f"""\
#!/bin/bash
# {nodes} machines with {on_each} processes on each; sbatch FILE. The folder of the run has to be shared by all of them.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={on_each}
#SBATCH --output=%x-%j.log
# a device for each process; take the line out on machines without
#SBATCH --gpus-per-node={on_each}
# two minutes before the time is over every process finishes its step and saves; sbatch again goes on from there
#SBATCH --signal=TERM@120

# the first machine and the port of the job are found by SLURM's own variables
exec srun --kill-on-bad-exit=1 thrice {train}
"""


def kubernetes(name: str, train: str, nodes: int, on_each: int) -> str:
    command = _torchrun(nodes, on_each, "$JOB_COMPLETION_INDEX", f"{name}-0.{name}", train)
    return f"""\
# {nodes} pods with {on_each} processes in each; kubectl apply -f FILE
# yours to say: the image (with thrice and its torch) and the claim of a volume that all pods can write
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None  # headless: each pod has a name, and rank 0's is where they meet
  publishNotReadyAddresses: true
  selector:
    job-name: {name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: 0  # one pod that starts again alone would not find the others; apply again, and the run goes on
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      terminationGracePeriodSeconds: 600  # a step is finished and saved
      containers:
        - name: thrice
          image: IMAGE
          workingDir: /work
          command:
            - sh
            - -c
            - |
              exec {command}
          env:
            - name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT
              value: "590"
          resources:
            limits:
              nvidia.com/gpu: {on_each}  # a device for each process; take it out on machines without
          volumeMounts:
            - name: work
              mountPath: /work
            - name: shared-memory
              mountPath: /dev/shm
      volumes:
        - name: work
          persistentVolumeClaim:
            claimName: CLAIM
        - name: shared-memory
          emptyDir:
            medium: Memory
"""


def skypilot(name: str, train: str, nodes: int, on_each: int) -> str:
    first = '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
    return f"""\
# {nodes} machines with {on_each} processes on each; sky launch FILE
# yours to say: the accelerators, how thrice gets there, and a folder for the run that all machines share
name: {name}
num_nodes: {nodes}
workdir: .
resources:
  accelerators: H100:{on_each}  # a device for each process
envs:
  TORCH_ELASTIC_SHUTDOWN_TIMEOUT: "600"  # seconds in which a step is finished and saved
setup: |
  pip install .
run: |
  {_torchrun(nodes, on_each, "$SKYPILOT_NODE_RANK", first, train)}
"""


def _torchrun(nodes: int, on_each: int, node_rank: str, address: str, train: str) -> str:
    return (
        f'torchrun --nnodes {nodes} --nproc-per-node {on_each} --node-rank "{node_rank}" '
        f'--master-addr "{address}" --master-port {PORT} -m thrice.cli {train}'
    )


KINDS = {"slurm": slurm, "kubernetes": kubernetes, "skypilot": skypilot}
