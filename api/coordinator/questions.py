"""What the embedder leaves beside a job, for the conductor; the codec is `feature_store.job_files.questions`."""

from feature_store.job_files.questions import batch_of, read_failure, read_questions

__all__ = ["batch_of", "read_failure", "read_questions"]
