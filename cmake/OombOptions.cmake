# Every switch of the build, in one place. AUTO means "use it where it is found"; ON makes a missing part an error.
set(OOMB_CUDA AUTO CACHE STRING "CUDA kernels: AUTO, ON or OFF")
set(OOMB_TORCH AUTO CACHE STRING "LibTorch, needed by the worker: AUTO, ON or OFF")
set_property(CACHE OOMB_CUDA PROPERTY STRINGS AUTO ON OFF)
set_property(CACHE OOMB_TORCH PROPERTY STRINGS AUTO ON OFF)
option(OOMB_BUILD_TESTS "Build the tests" ON)
option(OOMB_WERROR "Warnings are errors" ON)
set(OOMB_SANITIZE "" CACHE STRING "Comma-separated sanitizers: address,undefined or thread")
set(OOMB_PYTHON "" CACHE FILEPATH "Python whose torch package brings LibTorch (empty: python3, then the per-user cache)")

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
