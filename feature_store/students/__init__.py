"""Students: models trained on public images and released answers only.

    release --> NoisyAnswers --> matched | discriminant                      (read the counts themselves)
                             --> soft_labels --> prototypes | spreading

`fit_student("planned", ...)` is the default. Students lie below both `api` and `workers`, because a service labels the
images of a job in the same way as `labeler run`.
"""

from __future__ import annotations

from feature_store.students.answers import NoisyAnswers, denoise, soft_labels
from feature_store.students.student import Learners, Student, fit_student

__all__ = [
    "Learners",
    "NoisyAnswers",
    "Student",
    "denoise",
    "fit_student",
    "soft_labels",
]
