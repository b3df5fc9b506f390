"""How right a student is, where truth is known."""

from __future__ import annotations

from feature_store.students import Student
from workers.jobs.public_images import PublicImages


def accuracy(student: Student, images: PublicImages) -> float:
    """Share of images a student is right on, 0 to 1."""
    return float((student.predict(images.features) == images.labels).mean())
