"""The optimizer in the step: gradients are applied where they are made, and go.

``updates`` makes it another program of the same step, ``proof`` says that it is, ``alone`` finds out whether an
optimizer's step may be taken for one parameter at a time, ``costs`` what each takes, ``one_by_one`` takes it.
"""
