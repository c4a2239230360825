"""The trainer of the experiments in `params/`: `python -m trainer --help`.

flags        what the command line says
main         from the command line to an exit status
run_folder   the run that a folder belongs to
devices      a device for each stage, before TensorFlow starts
build        the model of an experiment
train        a run, from its last checkpoint to its last step
checkpoints  all that an exact restart needs
metrics      measurements on disk
progress     what one sees meanwhile
evaluate     the model's loss beside those that it should beat
export       the files of a trained model, and how accurate each of them is
"""
