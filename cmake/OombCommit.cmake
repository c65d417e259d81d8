# OOMB_COMMIT: what benchmarks say they were made from, as of the last configure; "unknown" outside a clone.
set(OOMB_COMMIT "unknown")
find_package(Git QUIET)
if(Git_FOUND)
  execute_process(COMMAND "${GIT_EXECUTABLE}" describe --always --dirty --abbrev=12
    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
    OUTPUT_VARIABLE _commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _failed)
  if(NOT _failed AND _commit)
    set(OOMB_COMMIT "${_commit}")
  endif()
endif()
