# cmake --install: libraries, public headers, the command, and a package for find_package(convoy)
# with the components `core` (torch-free) and `convoy`.
include(CMakePackageConfigHelpers)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/convoy)

install(TARGETS convoy_core EXPORT convoy_core FILE_SET HEADERS)
install(EXPORT convoy_core FILE convoyCoreTargets.cmake NAMESPACE convoy:: DESTINATION ${package_folder})
if(TARGET convoy_mpi)
  install(TARGETS convoy_mpi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
set(CONVOY_COMPONENTS core)
if(TARGET convoy)
  install(TARGETS convoy EXPORT convoy FILE_SET HEADERS)
  install(EXPORT convoy FILE convoyConvoyTargets.cmake NAMESPACE convoy:: DESTINATION ${package_folder})
  list(APPEND CONVOY_COMPONENTS convoy)
endif()
install(TARGETS convoy_command)

configure_package_config_file(cmake/convoyConfig.cmake.in ${PROJECT_BINARY_DIR}/convoyConfig.cmake
  INSTALL_DESTINATION ${package_folder} NO_SET_AND_CHECK_MACRO)
# 0.x: a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/convoyConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/convoyConfig.cmake ${PROJECT_BINARY_DIR}/convoyConfigVersion.cmake
  DESTINATION ${package_folder})
install(FILES LICENSE README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
