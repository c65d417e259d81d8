# Finds what the parts need. Each optional part sets OOMB_HAVE_<PART>; OombSummary prints them.
include(FindLibTorchWheel)

# --- CUDA -----------------------------------------------------------------------------------------------------------
set(OOMB_HAVE_CUDA OFF)
if(NOT OOMB_CUDA STREQUAL "OFF")
  # 12.0 is the first nvcc that knows C++20 and sm_90a. A toolkit folder without nvcc cannot compile anything.
  find_package(CUDAToolkit 12.0 QUIET)
  if(CUDAToolkit_FOUND AND CUDAToolkit_NVCC_EXECUTABLE)
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 90a)
    endif()
    if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
      set(CMAKE_CUDA_COMPILER "${CUDAToolkit_NVCC_EXECUTABLE}")  # nvcc need not be on PATH
    endif()
    enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      # CMake 3.25 knows no C++20 flag for nvcc 12 and newer, which have it.
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
    set(OOMB_HAVE_CUDA ON)
  elseif(OOMB_CUDA STREQUAL "ON")
    message(FATAL_ERROR "OOMB_CUDA=ON but no CUDA toolkit (12.0 or newer, with nvcc) was found: put nvcc on PATH, set "
      "CUDAToolkit_ROOT, or use OOMB_CUDA=OFF")
  endif()
endif()

# --- libraries of every build ---------------------------------------------------------------------------------------
# All that is missing is named at once. tools/setup.sh has the same list with the packages that bring each.
set(_missing "")
macro(oomb_need name)
  find_package(${name} ${ARGN} QUIET)
  if(NOT ${name}_FOUND)
    list(APPEND _missing ${name})
  endif()
endmacro()
oomb_need(yaml-cpp)
oomb_need(nlohmann_json 3.9)
oomb_need(Boost 1.74)
oomb_need(CLI11)
oomb_need(spdlog)
oomb_need(MPI COMPONENTS C)
if(OOMB_BUILD_TESTS)
  oomb_need(GTest)
endif()
if(_missing)
  list(JOIN _missing ", " _missing)
  message(FATAL_ERROR "Not found: ${_missing}. Run 'make deps', or add their prefixes to CMAKE_PREFIX_PATH")
endif()
# The C interface only: the C++ bindings of old would need a library of their own.
set_property(TARGET MPI::MPI_C APPEND PROPERTY INTERFACE_COMPILE_DEFINITIONS OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
# 0.8 put the target into a namespace.
if(TARGET yaml-cpp::yaml-cpp)
  set(OOMB_YAML_CPP yaml-cpp::yaml-cpp)
else()
  set(OOMB_YAML_CPP yaml-cpp)
endif()

# --- UCX ------------------------------------------------------------------------------------------------------------
set(OOMB_HAVE_UCX OFF)
if(NOT OOMB_UCX STREQUAL "OFF")
  find_package(ucx CONFIG QUIET)
  if(ucx_FOUND)
    # ucp does not bring ucs along.
    add_library(oomb_ucx INTERFACE)
    target_link_libraries(oomb_ucx INTERFACE ucx::ucp ucx::ucs)
    set(OOMB_HAVE_UCX ON)
  elseif(OOMB_UCX STREQUAL "ON")
    message(FATAL_ERROR "OOMB_UCX=ON but UCX was not found: install libucx-dev, or add its prefix to CMAKE_PREFIX_PATH")
  endif()
endif()

# --- LibTorch -------------------------------------------------------------------------------------------------------
set(OOMB_HAVE_TORCH OFF)
if(NOT OOMB_TORCH STREQUAL "OFF")
  oomb_find_libtorch()
  if(TARGET oomb::torch)
    set(OOMB_HAVE_TORCH ON)
  elseif(OOMB_TORCH STREQUAL "ON")
    message(FATAL_ERROR "OOMB_TORCH=ON but no python with torch 2.11 was found: run 'make deps', or set OOMB_PYTHON")
  endif()
endif()

# --- NCCL -----------------------------------------------------------------------------------------------------------
set(OOMB_HAVE_NCCL OFF)
if(OOMB_HAVE_CUDA AND NOT OOMB_NCCL STREQUAL "OFF")
  find_package(NCCL 2.14 QUIET)  # the first with non-blocking communicators
  set(OOMB_HAVE_NCCL ${NCCL_FOUND})
endif()
if(OOMB_NCCL STREQUAL "ON" AND NOT OOMB_HAVE_NCCL)
  message(FATAL_ERROR "OOMB_NCCL=ON but there is no NCCL 2.14 or newer with a CUDA toolkit: set NCCL_ROOT to its folder")
endif()
