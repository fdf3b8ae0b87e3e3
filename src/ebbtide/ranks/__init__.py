"""What the ranks of a ``DistributedDataParallel`` tell each other, so that none waits for one that does not come.

Each rank plans for itself, and plans may differ: a planned step holds no collective. But a rank that is refused, or
fails, does not come to the exchange of gradients, and the others would wait there until the group's timeout. So ranks
talk over the group's store, where nobody waits for anybody without a limit:

- ``member``: what one wrapper's calls do, and the one bool that a steady step reads;
- ``backwards``: the backward through a wrapper, when it exchanges gradients, and what an error in it leaves waiting;
- ``first_call``: before its first step all ranks say what they plan for, and that they have planned, or why not;
- ``rank_group``: a rank's thread that looks for what others have published, and what follows a failure;
- ``journal``: which exchanges have begun, so that a rank that fails can stand in for its part of those in which others
  are;
- ``messages``: errors as they travel.
"""
