"""What a job leaves on disk: one codec per kind of file, whoever writes it, the service or `labeler run`.

    questions       jobs/JOB/questions.safetensors, or failed.json and why     (both read by the coordinator)
    choosing        the program that makes them of upload.parquet or public.shard
    naming          which image a question is named after
    releases        what a round opened: a row of the journal, a file of a `run`
    pseudo_labels   the table of answers, as Parquet and every export of it
    image_labels    what the student says of every public image
    models          a released model as a file that travels alone
    for_students    what `labeler student` finds in the folder of a finished `run`

Bytes that are stored or handed out do not change between versions: tests/golden/test_job_files.py holds their digests.
"""
