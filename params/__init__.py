"""The experiments: classes of hyperparameters, one file a task. Copy `template.py`.

A class of a file here is found by name, as `--params=lm.Tiny`; one of any other package
or file that Python can import likewise, as `--params=my_package.my_file.Mine`. It lists
only what differs from its parent class. Neither listing nor describing an experiment
imports TensorFlow; building its model or dataset does.
"""

if __name__ == "params":
    raise ImportError(
        "Expected an import from tfgpipe_params; received its former name params, "
        "which another package may have as well."
    )
