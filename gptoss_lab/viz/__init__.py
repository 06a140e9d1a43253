"""Figures and widgets of the notebooks: plotly on top of pure functions that the tests check.

Every module holds one subject and the same two layers: a function that computes the numbers (tensors or plain lists in,
numbers out) and a function that draws exactly those numbers. A figure says in its subtitle where its numbers come
from: live (computed here, now), recorded (a file of data/measured), published (a source), modelled (a formula).

    style         the one look of all figures, and the mark of origin
    hierarchy     the model as a map of its modules, with shapes and parameters
    sizes         which bytes of a checkpoint are what, in MXFP4, FP8 and bf16
    exponents     the MXFP4 exponents of a 128x128 block, and which of them e4m3 can hold
    yarn          the YaRN ramp, rounded and unrounded
    window        who sees whom in a full and in a sliding layer
    activation    the clamped SwiGLU
    cache         bytes of a sequence's keys and values
    sinks         what a sink takes from the softmax, and how much of it each head gives away
    routing       which experts a prompt visits in each layer
    conversation  a Harmony conversation as coloured tokens
    attention_*   sink attention: readings and steps, splits, share of the sink, StreamingLLM, sources side by side,
                  the Triton kernels interpreted, timings against their bound
    moe_*         MoE: routing and rows, ways to give a bias, promotion, padding, the epilogue, decode, skew, precision
    profile_*     the fast forward's launches, their roofline, a trace on a time line, what is left
    tune_*        tiles, waves and lanes for 2880 and 7168; launches timed in both ways
    accuracy      what each precision choice does to nano's answers, with intervals
    cost_*        bounds, the fitted model, prefill rows, decode charts, the explorer of plans and prices
    fleet_*       a fleet in simulation against queueing theory, and what breaks first as traffic grows
    parallel_*    plans: who holds what, what moves, what it costs, EP against TP, split tokens, hand-over, live ranks
    speculation_* drafts: rounds foretold, the rule enumerated, the ring, bytes and gain, shared experts, heads
    disaggregation_*  split pools: pages to scale, what hides, two processes, a form for each side, pools or one
    interpreter   Triton kernels on the CPU, in a process of their own
    engine_*      the engine: memory, schedule, captured steps; who drafts, what stands and what it gains
    reading       chats for passes that are looked into
    chat          a conversation with tools that run, and a line to type into
    recorded      result rows as a table that names its machine
    table         rows of words and numbers, shown whole
    peer          the same weights in transformers
    session       which checkpoint and device; giving memory back
    explore       sliders over any of these functions
"""
