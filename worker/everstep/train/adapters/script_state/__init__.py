"""What is kept and checked of a script's own objects in a run whose loop belongs to a framework.

Part of the state are plain values that callbacks, trainers and modules of the script's own classes keep in their
attributes, such as a factor of the learning rate or a count of bad evaluations, and callbacks' small tensors:
`ScriptAttributes`. It warns of an attribute that it cannot keep. Weights that a callback keeps and changes, such as an
average of the model's, are in no commit and in no new process. They are refused: `CallbackWeights`.
"""

from everstep.train.adapters.script_state.attributes import ScriptAttributes, attributes_set_by_script
from everstep.train.adapters.script_state.callback_weights import CallbackWeights

__all__ = ["CallbackWeights", "ScriptAttributes", "attributes_set_by_script"]
