"""What capture does to keep eager's meaning, one rule a module.

Rules come in four kinds, by when they act (``trace`` opens or calls each):
1. While the step is traced, a context corrects what torch would do: kernels that a trace would decompose
   (``eager_kernels``, ``cuda.batch_norm``), descriptions of results (``layouts``, ``norm_dtypes``,
   ``grouped_products``, ``byte_labels``, ``attention_seeds``),
   draws (``dropout``), what sizes may be asked (``ctc``). They are opened in ``trace.capture_settings``.
2. Dynamo's graph is rewritten before AOTAutograd sees it: ``checks``, ``recurrent`` (the backend of
   ``trace.compile_step``).
3. The joint graph is rewritten before it is read: ``uninitialised``, ``batch_norm``, ``copy_back``,
   ``gradient_copies``, ``counted_weights`` (``joint.read_joint`` and what calls it).
4. What single ops may do, such as run again or draw random numbers, is no rule but a trait (``capture.traits``).
"""
