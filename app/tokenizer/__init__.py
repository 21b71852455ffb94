"""Text or chat messages -> token ids, as the engine that serves the model makes them.

    front.py    what the API calls: model -> tokenizer, cache of recent prompts, bounded wait
    process.py  one child process and the frames to and from it
    prompts.py  what travels between the two
    worker.py   the child: loads tokenizers (transformers) and runs them
    chat.py     messages as vLLM hands them to a chat template

A child process, not a thread. Loading `transformers` and a vocabulary holds the interpreter's lock for
hundreds of milliseconds and rendering a chat template holds it for its whole length, so a thread would stall
every match of the process meanwhile; and a download that hangs cannot be ended inside a thread. Here the
event loop hashes a prompt's bytes, writes them to a pipe and reads token ids back; nothing of the prompt is
parsed in it. The service neither imports transformers nor starts the child before the first prompt needs it.
"""
