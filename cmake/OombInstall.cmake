# bin/oomb and bin/oomb-worker side by side, and the runs and batch scripts a user starts from.
include(GNUInstallDirs)
foreach(program IN ITEMS oomb oomb-worker)
  if(TARGET ${program})
    install(TARGETS ${program} RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
  endif()
endforeach()
install(DIRECTORY configs/ DESTINATION "${CMAKE_INSTALL_DATADIR}/oomb/configs"
  FILES_MATCHING PATTERN "*.yaml" PATTERN "*.json")
if(EXISTS "${PROJECT_SOURCE_DIR}/slurm")
  install(DIRECTORY slurm/ DESTINATION "${CMAKE_INSTALL_DATADIR}/oomb/slurm" USE_SOURCE_PERMISSIONS
    FILES_MATCHING PATTERN "*.sbatch" PATTERN "*.sh")
endif()
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DOCDIR}")
