# Language level, warnings and sanitizers, attached to one interface target that every target of ours links.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

find_package(Threads REQUIRED)
find_package(OpenMP COMPONENTS CXX)

add_library(oomb_options INTERFACE)
target_include_directories(oomb_options INTERFACE "${PROJECT_SOURCE_DIR}")
target_compile_options(oomb_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wno-missing-field-initializers -Wno-restrict>)
if(OOMB_WERROR)
  target_compile_options(oomb_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
target_link_libraries(oomb_options INTERFACE Threads::Threads)
if(OOMB_SANITIZE)
  # Undefined behaviour only prints a line by default: a test must fail on it.
  target_compile_options(oomb_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${OOMB_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g>)
  if(OOMB_SANITIZE MATCHES "thread")
    # Asio's and libstdc++'s fences are not modelled by the thread sanitizer; the compiler warns at each of them.
    target_compile_options(oomb_options INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-tsan>)
  endif()
  target_link_options(oomb_options INTERFACE -fsanitize=${OOMB_SANITIZE})
endif()
# GNU OpenMP is not instrumented, so the thread sanitizer would report its barriers as races: those builds run serially.
if(OpenMP_CXX_FOUND AND NOT OOMB_SANITIZE MATCHES "thread")
  set(OOMB_OPENMP ON)
  # The compiler adds its runtime by name. By path it would be at odds with the libgomp.so.1 beside LibTorch, the one
  # that is loaded in the worker: both would claim a place in the run path.
  set_target_properties(OpenMP::OpenMP_CXX PROPERTIES
    INTERFACE_LINK_LIBRARIES "" INTERFACE_LINK_OPTIONS "${OpenMP_CXX_FLAGS}")
else()
  set(OOMB_OPENMP OFF)
endif()

find_program(OOMB_CCACHE ccache)
if(OOMB_CCACHE)
  # Without this a file that uses a precompiled header is never a cache hit.
  set(_launcher "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros "${OOMB_CCACHE}")
  set(CMAKE_CXX_COMPILER_LAUNCHER "${_launcher}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${_launcher}")
endif()
