"""Students: models trained on public images and released answers only.

    release --> NoisyAnswers --> soft_labels --> prototypes | linear probe | spreading --> (fine-tuned network)

`fit_student("auto", ...)` is the default; `finetune` is imported by those who want it, because it needs torch.
"""

from __future__ import annotations

from workers.students.answers import NoisyAnswers, denoise, soft_labels
from workers.students.student import Student, StudentKind, fit_student, load_student

__all__ = ["NoisyAnswers", "Student", "StudentKind", "denoise", "fit_student", "load_student", "soft_labels"]
