"""The interface of `import labeler` in a notebook or a script: folders of images in, labeled images out.

    embed      images -> EmbeddedImages (a shard)
    plan       what a job would cost, or the noise for a price -> Plan
    run        shards and public images -> LabeledJob, in this process
    open_job   the folder of an earlier job -> LabeledJob
    load_student  a student.safetensors -> TrainedStudent, which labels new images
    connect    a running service -> Service

Importing this loads no learning library; each call loads what it needs.
"""

from __future__ import annotations

from workers.notebook.job import LabeledJob, TrainedStudent, load_student, open_job
from workers.notebook.local import EmbeddedImages, Plan, Service, connect, embed, plan, run

__all__ = [
    "EmbeddedImages",
    "LabeledJob",
    "Plan",
    "Service",
    "TrainedStudent",
    "connect",
    "embed",
    "load_student",
    "open_job",
    "plan",
    "run",
]
