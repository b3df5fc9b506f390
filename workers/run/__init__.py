"""A batch job in one process, `labeler run`: its task file, its folder, its rounds, what it gives back.

task_file      what the file says
preparation    read, check and price everything, before anybody is asked
folder         the output folder and its lock
labelling      the whole job                    round   its rounds, by the machines of the service
publishing     labels, student, report: free, from what was released
student, demo  `labeler student`, `labeler demo`
"""
