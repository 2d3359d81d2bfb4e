"""The paper's tables in miniature: `tracefp4 reproduce NAME` trains every mode from one start, with the same seeds,
evaluates it in FP4 and in BF16, and writes tables and plots. See docs/reproduction.md.

    experiments   what each command compares: tables, their arms (a mode and the settings in which it differs)
    rung          a recipe of the task ladder: the warm start and the RL recipe that all arms of a table share
    plan          what is to be run in a folder, and what it holds already
    runner        one process a run, several side by side, with a deadline; places: for processes, shared by commands
    reuse         runs that several tables or commands have in common, trained once
    search        settings under which a control is stable
    stats         means, errors and intervals over seeds; when a curve rises, when it collapses
    results       figures of the runs, over seeds; stability of the control; paired differences
    page          tables and plots as Markdown, HTML, PNG and on the terminal
    pack          the state that travels between machines
"""
