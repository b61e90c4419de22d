#!/bin/sh
# Tests with escnn itself, in an environment of its own: escnn 1.0.11 needs numpy < 2, and a Fortran compiler (gfortran)
# for one of its dependencies.
#
#     sh tests/oracles/escnn.sh FOLDER     # makes FOLDER once (some minutes), then runs the tests
set -e
folder=${1:?"give the folder of the environment, for example /tmp/escnn"}
if [ ! -e "$folder/ready" ]; then
    command -v gfortran > /dev/null || { echo "escnn's dependency py3nj needs gfortran; install it first" >&2; exit 1; }
    ${PYTHON:-python3} -m venv "$folder"
    export PATH="$folder/bin:$PATH"
    echo "numpy<2" > "$folder/constraints.txt"
    install="python -m pip install -q -c constraints.txt -c $folder/constraints.txt"
    $install torch numpy
    $install setuptools wheel meson meson-python ninja cython pybind11
    $install --no-build-isolation py3nj lie_learn
    $install escnn==1.0.11 -e . pytest hypothesis
    # escnn uses scikit-learn for dihedral groups where it finds it, in a way that later versions refuse
    python -m pip uninstall -q -y scikit-learn
    touch "$folder/ready"
fi
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$folder/bin/python" -m pytest -p no:cacheprovider tests/oracles/test_escnn_layers.py
