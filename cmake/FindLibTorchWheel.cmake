# LibTorch out of a Python wheel, without find_package(Torch).
#
# A CUDA wheel's TorchConfig stops on a machine without a toolkit and rewrites CMAKE_CUDA_FLAGS where there is one, so
# the libraries are imported by path: torch_cpu and c10 always, c10_cuda where we build CUDA code. The worker opens
# libtorch_cuda at run time, only when it is told to use a GPU: a CPU run then never maps it.
#
# oomb_find_libtorch() defines the target oomb::torch and sets
#   OOMB_TORCH_ROOT, OOMB_TORCH_VERSION   the torch package folder and its version
#   OOMB_TORCH_RPATH                      folders of its libraries and of the CUDA libraries that came with it
#   OOMB_TORCH_PYTHON                     the python it belongs to; tests that compare with PyTorch run this one
#   OOMB_TRANSFORMERS_VERSION             of that python, empty where it has none (only tests use it)
# The python is OOMB_PYTHON, else python3, else the virtual environment that tools/setup.sh made in the user's cache.

function(_oomb_torch_of python out_root out_version out_transformers)
  # The packages are looked up without importing them: importing torch takes seconds and needs all its dependencies.
  execute_process(
    COMMAND "${python}" -c "import importlib.metadata as m, importlib.util as u, os, re
root = os.path.dirname(u.find_spec('torch').origin)
text = open(os.path.join(root, 'version.py')).read()
version = re.search(r\"__version__ = '([^']+)'\", text).group(1)
try:
    transformers = m.version('transformers')
except m.PackageNotFoundError:
    transformers = ''
print(root, version, transformers, sep=';')"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(failed)
    set(${out_root} "" PARENT_SCOPE)
    return()
  endif()
  list(GET found 0 root)
  list(GET found 1 version)
  list(GET found 2 transformers)
  set(${out_root} "${root}" PARENT_SCOPE)
  set(${out_version} "${version}" PARENT_SCOPE)
  set(${out_transformers} "${transformers}" PARENT_SCOPE)
endfunction()

function(oomb_find_libtorch)
  set(wanted 2.11)
  if(NOT "$ENV{XDG_CACHE_HOME}" STREQUAL "")
    set(cache "$ENV{XDG_CACHE_HOME}/oomb")
  else()
    set(cache "$ENV{HOME}/.cache/oomb")
  endif()
  if(OOMB_PYTHON)
    set(candidates "${OOMB_PYTHON}")
  else()
    set(candidates python3 "${cache}/venv/bin/python")
  endif()
  foreach(python IN LISTS candidates)
    _oomb_torch_of("${python}" root version transformers)
    if(NOT root)
      continue()
    endif()
    if(NOT version MATCHES "^${wanted}\\.")
      message(STATUS "torch ${version} of ${python} is not ${wanted}: not used")
    elseif(NOT EXISTS "${root}/lib/libtorch_cpu.so" OR NOT EXISTS "${root}/include/ATen/ATen.h")
      message(STATUS "torch ${version} of ${python} lacks its C++ libraries or headers: not used")
    else()
      set(found_python "${python}")
      break()
    endif()
    set(root "")
  endforeach()
  if(NOT root)
    return()
  endif()

  add_library(oomb::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(oomb::torch SYSTEM INTERFACE
    "${root}/include" "${root}/include/torch/csrc/api/include")
  # torch carries its own fmt headers; header-only use keeps them from meeting another fmt at link time.
  target_compile_definitions(oomb::torch INTERFACE FMT_HEADER_ONLY)
  # The wheel's own dependencies (CUDA runtime, CUPTI) lie beside it or in the toolkit; they are found at run time.
  target_link_options(oomb::torch INTERFACE
    "-Wl,--allow-shlib-undefined" "-Wl,--unresolved-symbols=ignore-in-shared-libs"
    "-Wl,--version-script=${PROJECT_SOURCE_DIR}/cmake/hide_std_strings.map")
  target_link_libraries(oomb::torch INTERFACE "${root}/lib/libtorch_cpu.so" "${root}/lib/libc10.so")
  if(OOMB_HAVE_CUDA)
    target_link_libraries(oomb::torch INTERFACE "${root}/lib/libc10_cuda.so")
  endif()
  set(rpath "${root}/lib")
  cmake_path(GET root PARENT_PATH packages)
  if(EXISTS "${packages}/nvidia/cu13/lib")
    list(PREPEND rpath "${packages}/nvidia/cu13/lib")
  endif()
  set(OOMB_TORCH_ROOT "${root}" PARENT_SCOPE)
  set(OOMB_TORCH_RPATH "${rpath}" PARENT_SCOPE)
  set(OOMB_TORCH_VERSION "${version}" PARENT_SCOPE)
  set(OOMB_TORCH_PYTHON "${found_python}" PARENT_SCOPE)
  set(OOMB_TRANSFORMERS_VERSION "${transformers}" PARENT_SCOPE)
endfunction()
